"""A result that several processes cache is computed in one of them, and the lock outlives nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_npu.finetune.data import turns
from tests.support import tiny

_WORK = """
import os, sys, time
from pathlib import Path
from megatron_npu.finetune.data.turns import first_alone
place = Path(sys.argv[1])
with first_alone(place / "lock"):
    if not (place / "result").exists():
        (place / f"computes {os.getpid()}").touch()
        time.sleep(float(sys.argv[2]))
        (place / "result").touch()
"""


def _started(place: Path, seconds: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", _WORK, str(place), str(seconds)]
    return subprocess.Popen(argv, env=tiny.environment())


def _computes(place: Path, count: int) -> None:
    until = time.monotonic() + 60
    while len(list(place.glob("computes *"))) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_process_computes_and_the_others_wait(tmp_path: Path) -> None:
    processes = [_started(tmp_path, 0.5) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("computes *"))) == 1


def test_who_waits_for_one_that_is_killed_goes_on(tmp_path: Path) -> None:
    first = _started(tmp_path, 600)
    _computes(tmp_path, 1)
    second = _started(tmp_path, 0)
    time.sleep(0.2)
    assert second.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    assert second.wait(60) == 0
    assert (tmp_path / "result").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("kept")
    link = tmp_path / "lock"
    link.symlink_to(tmp_path / "private")
    os.chown(link, 65_534, 65_534, follow_symlinks=False)
    with pytest.raises(OSError, match="lock"), turns.first_alone(link):
        pass
    assert (tmp_path / "private").read_text() == "kept"
