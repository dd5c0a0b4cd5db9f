"""Flags shared by several commands, one file per feature."""
