"""``megatron-npu doctor``: report what is installed, what works, and how to fix what does not."""
