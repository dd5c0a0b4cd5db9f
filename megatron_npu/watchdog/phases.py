"""What the main thread of this process is doing for the run: whoever does it enters the phase by its name."""

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
    """Be in a phase inside the block, or in the function that this decorates; an inner one counts.

    The watchdog looks at the main thread: in another one this does nothing.
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
    """Return the phase that the main thread is in; None: nobody has said."""
    return next(reversed(_entered), None)
