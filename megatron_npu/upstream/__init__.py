"""Find the installed Megatron and the requirements of its scripts, without importing it."""
