"""Compute the matmuls of linear layers and their gradients."""
