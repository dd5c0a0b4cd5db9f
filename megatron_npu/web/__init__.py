"""Provide helpers that this project's web servers share: addresses and response headers."""
