"""Adaptors for the two Megatron-DeepSpeed trees: one folder for each tree, and shared code."""
