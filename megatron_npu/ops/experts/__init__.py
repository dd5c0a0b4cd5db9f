"""Mixtures of experts: who takes which token, and the grouped products."""
