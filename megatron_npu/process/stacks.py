"""Print the stacks of all threads on demand (``kill -USR1 PID``), if a run hangs, and one at a crash."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from types import FrameType


def print_on_signal() -> bool:
    """Install a SIGUSR1 handler that prints the stacks of all threads to stderr.

    The run continues.

    Without this handler, the signal ends the process. If the program handles the signal itself, now or later,
    its handler takes precedence.

    Returns:
        True if the handler was installed.
    """
    usr1 = getattr(signal, "SIGUSR1", None)  # Windows has none
    if usr1 is None or sys.__stderr__ is None or not _is_free(usr1):
        return False
    # at a second call Python's handler would take the place of faulthandler's, which ``register`` believes
    # to be there still
    faulthandler.unregister(usr1)
    with contextlib.suppress(ValueError):  # only the main thread may; elsewhere it prints all the same
        signal.signal(usr1, _noted)
    faulthandler.register(usr1, file=sys.__stderr__, all_threads=True, chain=True)
    return True


def leave_signal() -> None:
    """Undo ``print_on_signal``, unless the program has installed its own handler since then."""
    usr1 = getattr(signal, "SIGUSR1", None)
    if usr1 is None or not _is_free(usr1):
        return
    faulthandler.unregister(usr1)
    if signal.getsignal(usr1) is _noted:
        with contextlib.suppress(ValueError):
            signal.signal(usr1, signal.SIG_DFL)


def print_at_crash() -> bool:
    """Print the stack of the thread whose crash ends the process, such as SIGBUS after a mapped file was cut.

    Without this handler, nothing is printed.

    Returns:
        True if the handler was installed, and False if the program has installed one itself.
    """
    if sys.__stderr__ is None or faulthandler.is_enabled():
        return False
    faulthandler.enable(file=sys.__stderr__, all_threads=False)
    return True


def leave_crashes() -> None:
    """Undo ``print_at_crash``."""
    faulthandler.disable()


def _is_free(usr1: signal.Signals) -> bool:
    return signal.getsignal(usr1) in (signal.SIG_DFL, _noted)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing when the signal arrives, because ``faulthandler`` prints the stacks.

    ``signal.set_wakeup_fd`` notifies a thread only if a Python-level handler is installed.
    """


def print_now() -> None:
    """Print the stacks of all threads to stderr."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
