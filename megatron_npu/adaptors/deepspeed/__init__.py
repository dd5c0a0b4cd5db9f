"""Contain the adaptors for the two Megatron-DeepSpeed checkouts, and their shared code."""
