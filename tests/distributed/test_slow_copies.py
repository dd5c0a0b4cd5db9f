"""A copy to object storage that takes longer than a collective may wait does not end a healthy run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import processes, tiny

pytest.importorskip("fsspec")
WORKER = Path(__file__).parent / "slow_copy_worker.py"


def run(tmp_path: Path, what: str) -> str:
    """Run two ranks that copy a checkpoint of two files; return what they print."""
    folder = tmp_path / "iter_0000004"
    folder.mkdir()
    for name in ("first", "second"):
        (folder / name).write_text("weights")
    words = [str(WORKER), str(folder), f"file://{tmp_path / 'storage'}", what]
    done = processes.run([sys.executable, *tiny.torchrun(2), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_slow_copy_is_waited_for(tmp_path: Path) -> None:
    said = run(tmp_path, "slow")
    assert "rank 0 goes on" in said
    assert "rank 1 goes on" in said
    assert (tmp_path / "storage" / "iter_0000004" / "_SUCCESS").exists()
    assert "rank 0 is in wait_for_others" in said  # so the watchdog does not name rank 0, but rank 1


def test_a_lost_rank_is_not_waited_for(tmp_path: Path) -> None:
    said = run(tmp_path, "lost")
    assert "rank 0 ends: 1 of 2 ranks have not finished, and have sent no sign of life for 4 s" in said
    assert not (tmp_path / "storage" / "iter_0000004" / "_SUCCESS").exists()
