"""Execute a run of the built-in trainer, from the command to the last iteration."""
