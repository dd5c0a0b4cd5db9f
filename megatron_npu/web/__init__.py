"""Helpers that this project's web servers share: their addresses, and the headers of every response."""
