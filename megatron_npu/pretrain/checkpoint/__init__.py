"""Checkpoints of the built-in trainer."""
