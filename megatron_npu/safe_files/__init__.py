"""Readers of files that somebody else may have written: none of them runs code."""
