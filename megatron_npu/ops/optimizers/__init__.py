"""Provide optimizers, and operations that process lists of tensors together."""
