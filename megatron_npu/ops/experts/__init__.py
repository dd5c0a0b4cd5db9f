"""Mixture of experts: routing, permutation and grouped matmuls."""
