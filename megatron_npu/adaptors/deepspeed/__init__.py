"""Adaptors for the two Megatron-DeepSpeed checkouts: one folder for each, and shared code."""
