"""Provide helpers that the web servers of this project share: for addresses and response headers."""
