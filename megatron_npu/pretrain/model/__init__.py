"""Model, optimizer and data-parallel wrapper of the built-in trainer."""
