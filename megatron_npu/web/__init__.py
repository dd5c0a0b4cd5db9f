"""Provide helpers that this project's web servers share, for addresses and response headers."""
