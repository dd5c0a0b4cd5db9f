"""Patch mixture of experts: the router, permutation and grouped matmuls."""
