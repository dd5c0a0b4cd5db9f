"""Log one message before the first training step.

Adaptors trigger it.
"""

from __future__ import annotations

from collections.abc import Callable

_say: Callable[[], None] | None = None


def prepare(say: Callable[[], None] | None) -> None:
    """Set the function that is called before the next training step.

    None removes the function.
    """
    global _say
    _say = say


def before_step() -> None:
    """Call the function that ``prepare`` has set.

    Adaptors call this before every step, but only the first call has an effect.
    """
    global _say
    say, _say = _say, None
    if say is not None:
        say()
