"""Optimizers and multi-tensor operations."""
