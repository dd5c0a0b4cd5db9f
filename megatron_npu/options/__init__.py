"""Flags that are shared by several commands, with one file per feature."""
