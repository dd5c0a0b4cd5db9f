"""Provide operations for mixture of experts: routing, permutation and grouped matmuls."""
