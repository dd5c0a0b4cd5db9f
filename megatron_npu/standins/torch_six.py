"""Stub for ``torch._six``, which torch 2.0 removed."""

from math import inf

__all__ = ["inf"]
