"""The driver's checkpoints."""
