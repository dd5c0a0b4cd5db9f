"""Reference kernels for attention: dense, block-sparse and ring attention, with layouts and arithmetic."""
