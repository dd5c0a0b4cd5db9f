"""Provide operations for mixtures of experts: routing, token permutation and grouped matmuls."""
