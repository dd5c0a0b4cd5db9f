"""Core attention under context parallelism, in two processes, against the whole sequence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end import tiny

WORKER = Path(__file__).with_name("context_parallel_worker.py")


def test_every_mask_and_window_is_that_of_the_whole_sequence() -> None:
    pytest.importorskip("megatron.core")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(WORKER)],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal: ") == 6
