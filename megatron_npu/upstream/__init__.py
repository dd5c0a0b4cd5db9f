"""Find which Megatron is on the path, without importing it, and what its scripts need."""
