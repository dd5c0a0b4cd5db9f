"""Flags of the built-in trainer: their declarations, checks and derived values."""
