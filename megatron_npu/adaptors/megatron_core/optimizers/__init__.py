"""Patch the optimizers, including the distributed optimizer, and the sharding of weights."""
