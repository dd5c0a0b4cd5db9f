"""Find the copy of Megatron that is on the path, without importing it, and what its scripts require."""
