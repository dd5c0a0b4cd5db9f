"""Optimizers, the distributed one, and the sharding of weights."""
