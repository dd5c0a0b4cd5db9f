"""Flags of the built-in trainer: declaration, checks, derived values."""
