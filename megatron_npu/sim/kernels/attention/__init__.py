"""Define reference kernels for dense, sparse and ring attention, with their layouts and arithmetic."""
