"""Kernels of attention: dense, block-sparse and in a ring, with their layouts and their arithmetic."""
