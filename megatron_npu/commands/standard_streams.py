"""Replace standard streams that were closed when the process started, as by ``>&-`` or some daemons."""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Replace each standard stream that is closed with /dev/null.

    Otherwise Python has None instead of a stream, and the next file that is opened gets the closed stream's
    number: what a library or a child process prints would be written into a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which gets the lowest free number
            os.set_inheritable(number, True)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
