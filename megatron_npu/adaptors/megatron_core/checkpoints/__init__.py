"""Checkpoints of megatron-core: writing, loading and verification."""
