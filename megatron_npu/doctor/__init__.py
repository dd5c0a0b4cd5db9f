"""``megatron-npu doctor``: report what is installed and what works, with a fix for each problem."""
