"""Provide optimizers, and operations on lists of tensors."""
