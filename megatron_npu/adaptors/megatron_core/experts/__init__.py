"""Patch mixtures of experts: the router, the permutation of tokens, and grouped matmuls."""
