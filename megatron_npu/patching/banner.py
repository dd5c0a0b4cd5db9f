"""The line logged once before the first training step, triggered by adaptors."""

from __future__ import annotations

from collections.abc import Callable

_say: Callable[[], None] | None = None


def prepare(say: Callable[[], None] | None) -> None:
    """Call ``say`` before the next step; None: call nothing."""
    global _say
    _say = say


def before_step() -> None:
    """Call the prepared function. Adaptors call this before every step; it has an effect only once."""
    global _say
    say, _say = _say, None
    if say is not None:
        say()
