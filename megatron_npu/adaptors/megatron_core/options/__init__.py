"""Flags of the stock scripts: adding, rejecting and reading them."""
