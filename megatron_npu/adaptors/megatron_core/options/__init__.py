"""Flags of the stock scripts: added, refused, and read."""
