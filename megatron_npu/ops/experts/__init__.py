"""Mixtures of experts: routing, permutation and grouped products."""
