"""Contain the adaptors for two Megatron-DeepSpeed checkouts, and the code that they share."""
