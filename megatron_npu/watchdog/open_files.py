"""Check that ranks are allowed to open enough connections and checkpoint files."""

from __future__ import annotations

import logging
import os

from megatron_npu.base.errors import UsageError

logger = logging.getLogger(__name__)

_OWN = 100  # files of a rank's own: data, sockets of its groups, pipes to those that write checkpoints
_PER_RANK = 2  # connections to the store, in the rank that holds it: torch's and the watchdog's


def require_open_files(ranks: int) -> None:
    """Raise the limit on open files, if it is lower, to the minimum that a rank needs.

    If the store cannot open connections, torch's clients retry for ten minutes and print a page each time; if
    a single rank cannot open a socket, gloo ends it with a traceback.

    Args:
        ranks: the number of ranks in the run.

    Raises:
        UsageError: the hard limit is too low as well.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, more = _used(soft), _OWN + _PER_RANK * ranks
    if _allows(soft, used + more):
        return
    if not _allows(hard, used + more):
        raise UsageError(
            f"{ranks} rank{'s' * (ranks > 1)} on this machine need{'s' * (ranks == 1)} {more} more open "
            f"files, but the limit is {hard} (ulimit -Hn), {used} of which are in use",
            remedy="Raise the limit before the run starts: ulimit -n, limits.conf, docker run --ulimit "
            "nofile=65536.",
        )
    logger.info("raised the open-file limit from %d to %d", soft, used + more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))


def _used(limit: int) -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # not even the folder can be opened
        return limit


def _allows(limit: int, files: int) -> bool:
    return limit < 0 or limit >= files  # RLIM_INFINITY is -1
