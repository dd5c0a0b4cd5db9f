"""Write, read, check and convert checkpoints of the built-in trainer."""
