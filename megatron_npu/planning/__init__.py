"""Implement ``megatron-npu plan``, which runs the ranks of a job one by one and counts only device memory."""
