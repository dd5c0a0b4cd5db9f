"""Checkpoints: how they are written, read and compared."""
