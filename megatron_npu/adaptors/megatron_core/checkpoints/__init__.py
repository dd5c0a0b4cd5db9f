"""Patch the checkpoints of megatron-core: writing, loading and verification."""
