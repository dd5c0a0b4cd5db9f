"""Run processes for a test; each process is killed after a time limit, whether or not the test sets one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from os import PathLike
from typing import Any

LONGEST = 540  # seconds for whatever a test starts; the watchdog in pyproject.toml comes later


def run(
    command: str | Sequence[str | PathLike[str]], *, timeout: float | None = LONGEST, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run ``command`` like ``subprocess.run``, and kill it after a number of seconds.

    Args:
        command: the command and its arguments.
        timeout: the limit in seconds. None means no limit, which no test uses.
        options: options of ``subprocess.run``; ``check`` is False by default.

    Raises:
        subprocess.TimeoutExpired: the process was killed.
    """
    return subprocess.run(command, timeout=timeout, **{"check": False, **options})
