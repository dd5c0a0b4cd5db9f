"""Matmuls of linear layers and of their gradients."""
