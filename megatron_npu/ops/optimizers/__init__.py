"""Optimizers, and whole lists of tensors in one call."""
