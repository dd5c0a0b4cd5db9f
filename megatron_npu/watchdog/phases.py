"""Record the current phase of the main thread, which the running code enters by name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

Name = Literal[
    "starting", "loading", "training", "between two steps", "evaluating", "saving", "waiting for work"
]
SAVING: Name = "saving"  # on a slow disk it may stand still for long, as long as bytes go out
LOADING: Name = "loading"  # the same, as long as bytes come in
WAITING: Name = "waiting for work"  # of people, who may take as long as they like: nothing in it is a hang

_entered: list[Name] = []  # the innermost one last; another thread reads it


@contextlib.contextmanager
def phase(name: Name) -> Iterator[None]:
    """Enter a phase of the main thread for the ``with`` block or the decorated function.

    An inner phase takes precedence.

    A phase has no effect in other threads, because the watchdog observes the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _entered.append(name)
    try:
        yield
    finally:
        _entered.pop()


def current() -> Name | None:
    """Return the phase of the main thread, or None if it has not entered a phase."""
    return next(reversed(_entered), None)
