"""Mixture of experts: router, permutation and grouped matmuls."""
