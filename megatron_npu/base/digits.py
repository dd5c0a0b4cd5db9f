"""Parse non-negative integers from untrusted text."""

from __future__ import annotations

_MOST = 18  # digits, which fit in 64 bits


def number(text: str) -> int | None:
    """Convert a string of decimal digits to an integer.

    Return None for other texts and for more than 18 digits.

    ``int`` alone raises an error for over 4300 digits although ``isdecimal`` accepts them.
    """
    return int(text) if text.isdecimal() and len(text) <= _MOST else None
