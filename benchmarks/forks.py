"""Start ranks as forks of a process that has already imported everything."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def fork(be_a_rank: Callable[[int], None], ranks: int, what: str) -> None:
    """Call ``be_a_rank(rank)`` in one process per rank, and wait for all of them.

    This process must not have run a backward pass before.

    Raises:
        RuntimeError: a rank of ``what`` failed; its traceback is on stderr.
    """
    processes = [_start(be_a_rank, rank) for rank in range(ranks)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    if any(ends):
        raise RuntimeError(f"{what} failed")


def _start(be_a_rank: Callable[[int], None], rank: int) -> int:
    process = os.fork()
    if process:
        return process
    end = 1
    try:
        be_a_rank(rank)
        end = 0
    except BaseException:  # SystemExit of a script, too: what follows belongs to the parent
        traceback.print_exc()
    os._exit(end)
