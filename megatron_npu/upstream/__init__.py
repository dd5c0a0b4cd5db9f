"""Which Megatron is on the path, found without importing it, and what its scripts need."""
