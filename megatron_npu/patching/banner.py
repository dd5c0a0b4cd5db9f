"""The line logged once before the first training step; adaptors call it at the right time."""

from __future__ import annotations

from collections.abc import Callable

_say: Callable[[], None] | None = None


def prepare(say: Callable[[], None] | None) -> None:
    """Have ``say`` called before the next step; None: nothing."""
    global _say
    _say = say


def before_step() -> None:
    """Say what was prepared. Adaptors call this before every step; from the second on it does nothing."""
    global _say
    say, _say = _say, None
    if say is not None:
        say()
