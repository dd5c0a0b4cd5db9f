"""Flags that several commands share, one file a feature."""
