"""Provide optimizers and multi-tensor operations."""
