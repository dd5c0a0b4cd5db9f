"""Ring attention in three processes, where the next rank is not the previous one, is the attention of one."""

from __future__ import annotations

import sys

from tests.support import processes, tiny

RANKS = tiny.ROOT / "tests" / "sim" / "ranks.py"
WORKER = tiny.ROOT / "tests" / "distributed" / "ring_worker.py"


def test_three_ranks_are_the_whole_sequence() -> None:
    done = processes.run(
        [sys.executable, str(RANKS), "--torch", "3", str(WORKER)],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
