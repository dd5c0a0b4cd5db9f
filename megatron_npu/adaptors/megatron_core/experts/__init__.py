"""Mixtures of experts: router, permutation, grouped products."""
