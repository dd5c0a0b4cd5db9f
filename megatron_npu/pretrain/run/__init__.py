"""Execute a run of the built-in trainer, from the command line to the last iteration."""
