"""Contain code that the adaptors of several upstreams share."""
