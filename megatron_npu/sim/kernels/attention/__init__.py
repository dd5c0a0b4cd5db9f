"""Attention kernels: dense, block-sparse and ring attention, with their layouts and arithmetic."""
