"""The message that is logged once before the first training step; adaptors trigger it."""

from __future__ import annotations

from collections.abc import Callable

_say: Callable[[], None] | None = None


def prepare(say: Callable[[], None] | None) -> None:
    """Set the function to call before the next step. If ``say`` is None, no function is called."""
    global _say
    _say = say


def before_step() -> None:
    """Call the function that was set. Adaptors call this before every step; it has an effect only once."""
    global _say
    say, _say = _say, None
    if say is not None:
        say()
