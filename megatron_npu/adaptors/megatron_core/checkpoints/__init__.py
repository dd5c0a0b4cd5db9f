"""Patch how megatron-core writes, loads and verifies checkpoints."""
