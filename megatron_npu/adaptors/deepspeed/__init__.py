"""Adaptors for the two Megatron-DeepSpeed trees: one folder each, and shared parts."""
