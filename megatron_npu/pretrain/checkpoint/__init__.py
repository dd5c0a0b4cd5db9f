"""Write, read, check and convert the checkpoints of the built-in trainer."""
