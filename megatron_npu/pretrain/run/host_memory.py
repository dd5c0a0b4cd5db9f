"""Check that this machine has enough free memory before a large allocation."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

from megatron_npu.base.errors import UsageError

_GROUP = Path("/sys/fs/cgroup")  # of a container, where version 2 of control groups limits it


def require(needed: int, what: str) -> None:
    """Check that the given amount of memory is available, or raise an error.

    Args:
        needed: number of bytes.
        what: what needs the memory.

    Raises:
        UsageError: less memory is available.
    """
    free = available()
    if needed > free:
        raise UsageError(
            f"{what} needs {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are available",
            remedy="End other programs, or use a machine with more memory.",
        )


def available(group: Path = _GROUP) -> int:
    """Return the number of bytes that this process can allocate before the system swaps or kills it."""
    free = min(psutil.virtual_memory().available, _left_of_the_process())
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free
    # what is cached of files makes room
    return max(0, min(free, limit - used + int(statistics.get("inactive_file", 0))))


def _left_of_the_process() -> int:
    """Return the number of bytes that the limit of the process (ulimit -v) still allows it to allocate."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(0, limit - psutil.Process().memory_info().vms)
