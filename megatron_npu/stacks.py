"""Where every thread of a process stands, on demand: ``kill -USR1 PID``. For runs that hang."""

from __future__ import annotations

import faulthandler
import signal
import sys


def print_on_signal() -> bool:
    """Print the stacks of all threads on SIGUSR1, into the process's own standard error; the run goes on.

    Without it the signal ends a process. A program that handles the signal itself is left alone, and one that
    begins to do so later wins.

    Returns:
        Whether it does.
    """
    usr1 = getattr(signal, "SIGUSR1", None)  # Windows has none
    if usr1 is None or sys.__stderr__ is None or signal.getsignal(usr1) is not signal.SIG_DFL:
        return False
    faulthandler.register(usr1, file=sys.__stderr__, all_threads=True)
    return True
