"""Make Ctrl-C reliable, and make SIGTERM and SIGHUP end a command in the same way as Ctrl-C.

Python drops KeyboardInterrupt in ``__del__`` and in fork callbacks.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_AGAIN = 0.02  # seconds: by then what has dropped it is over


TERMINATING = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


class TerminatedError(KeyboardInterrupt):
    """Raised when SIGTERM or SIGHUP arrives inside a ``termination_heard`` block."""

    number = signal.SIGTERM


class HungUpError(TerminatedError):
    """Raised for SIGHUP."""

    number = signal.SIGHUP


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Resend SIGINT to the main thread if Python lost a KeyboardInterrupt inside the ``with`` block.

    Otherwise, such a Ctrl-C only prints two lines to stderr ("Exception ignored in"), and the run continues.
    """
    former = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # without ``threading``, whose locks may be what the main thread has just taken
            kind = dropped.exc_type
            again = kind.number if issubclass(kind, TerminatedError) else signal.SIGINT
            _thread.start_new_thread(_send_again, (again,))
        else:
            former(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = former


def _send_again(number: signal.Signals) -> None:
    time.sleep(_AGAIN)
    signal.pthread_kill(threading.main_thread().ident or 0, number)


@contextlib.contextmanager
def termination_heard() -> Iterator[None]:
    """Raise ``TerminatedError`` on SIGTERM or SIGHUP inside the ``with`` block, so that files and child
    processes are cleaned up.

    A second signal has its former effect. A signal that is ignored (``nohup``) stays ignored.
    """
    # known before any of them is replaced: a signal may come in between
    before = {
        number: handler for number in TERMINATING if (handler := signal.getsignal(number)) != signal.SIG_IGN
    }
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        raise HungUpError if number == signal.SIGHUP else TerminatedError

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer every SIGINT that arrives inside the ``with`` block until the end of the block, even if an error
    ends it.

    A signal that arrives during a fork would be lost. A process forked inside the block starts with a handler
    that only records the signal.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:  # also where the block has failed: its error is what this one's came after
            signal.raise_signal(signal.SIGINT)
