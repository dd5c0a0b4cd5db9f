"""Implement ``megatron-npu doctor``, which reports what is installed and what works, and how to fix
problems.
"""
