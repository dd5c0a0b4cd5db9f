"""The driver's model, optimizer and data-parallel wrapper."""
