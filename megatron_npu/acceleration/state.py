"""What a user's script asks this process for: its flags, a logger, timers."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace

from megatron_npu.acceleration.timers import Timers
from megatron_npu.errors import UsageError

_NAME = "megatron_npu.train"
_timers = Timers()
_args: list[Namespace] = []  # the one of this process


def set_args(args: Namespace | None) -> None:
    """Set what ``get_args`` returns; None: nothing any more."""
    _args[:] = [] if args is None else [args]


def get_args() -> Namespace:
    """Return the flags that the run was started with (``arguments.parse``).

    Raises:
        UsageError: no run was started.
    """
    if not _args:
        raise UsageError(
            "get_args() outside a run",
            "a process that `megatron-npu train` has started",
            "Start the script with `megatron-npu train --user-script FILE ...`.",
        )
    return _args[0]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger that writes to standard error, of rank 0 from ``--log-level`` on, of others warnings.

    Args:
        name: what is added to the logger's name.
    """
    root = logging.getLogger(_NAME)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    if _args:
        shown = logging.WARNING if _args[0].rank else _args[0].log_level.upper()
        root.setLevel(shown)
    return root if name is None else root.getChild(name)


def get_timers() -> Timers:
    """Return the timers of this process."""
    return _timers
