"""Implement ``megatron-npu plan``, which runs the ranks of a job one after another and counts only device
memory.
"""
