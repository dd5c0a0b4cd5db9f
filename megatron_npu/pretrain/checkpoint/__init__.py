"""Checkpoints of the built-in trainer: writing, reading, checking and converting them."""
