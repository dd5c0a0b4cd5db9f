"""Flags of the stock scripts: added, rejected, and read."""
