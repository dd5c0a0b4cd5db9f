"""Optimizers, including the distributed one, and sharding of weights."""
