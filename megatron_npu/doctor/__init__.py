"""``megatron-npu doctor``: what is installed, what works, and what to do about what does not."""
