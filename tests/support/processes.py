"""Processes that a test starts and waits for: they end, whether the test says when or not."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from os import PathLike
from typing import Any

LONGEST = 540  # seconds for whatever a test starts; the watchdog in pyproject.toml comes later


def run(
    command: str | Sequence[str | PathLike[str]], *, timeout: float | None = LONGEST, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run ``command`` as ``subprocess.run`` does, and kill it after so many seconds.

    Args:
        command: and its arguments.
        timeout: in seconds; None: it may take as long as it likes, which no test asks for.
        options: of ``subprocess.run``; ``check`` is False where it is not given.

    Raises:
        subprocess.TimeoutExpired: it has been killed.
    """
    return subprocess.run(command, timeout=timeout, **{"check": False, **options})
