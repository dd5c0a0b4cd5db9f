"""A copy to object storage that takes longer than a collective may wait does not end a healthy run."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import tiny, warm

pytest.importorskip("fsspec")
WORKER = Path(__file__).parent / "slow_copy_worker.py"


def run(tmp_path: Path, what: str) -> str:
    """Run two ranks that copy a checkpoint of two files; return what they print."""
    folder = tmp_path / "iter_0000004"
    folder.mkdir()
    for name in ("first", "second"):
        (folder / name).write_text("weights")
    words = [str(WORKER), str(folder), f"file://{tmp_path / 'storage'}", what]
    command = [sys.executable, *tiny.torchrun(2), *words]
    done = warm.run(command, env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """What the ranks printed, and their folder; both copies wait for seconds, so they do it together."""
    folders = {what: tmp_path_factory.mktemp(what) for what in ("slow", "lost")}
    with ThreadPoolExecutor() as pool:
        printed = pool.map(run, folders.values(), folders)
        return {what: (words, folders[what]) for what, words in zip(folders, printed, strict=True)}


def test_a_slow_copy_is_waited_for(said: dict[str, tuple[str, Path]]) -> None:
    words, folder = said["slow"]
    assert "rank 0 goes on" in words
    assert "rank 1 goes on" in words
    assert (folder / "storage" / "iter_0000004" / "_SUCCESS").exists()
    assert "rank 0 is in wait_for_others" in words  # so the watchdog does not name rank 0, but rank 1


def test_a_lost_rank_is_not_waited_for(said: dict[str, tuple[str, Path]]) -> None:
    words, folder = said["lost"]
    assert "rank 0 ends: 1 of 2 ranks have not finished, and have sent no sign of life for 4 s" in words
    assert not (folder / "storage" / "iter_0000004" / "_SUCCESS").exists()
