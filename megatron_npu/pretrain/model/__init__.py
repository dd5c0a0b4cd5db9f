"""Build the model, the optimizer and the data-parallel wrapper of the built-in trainer."""
