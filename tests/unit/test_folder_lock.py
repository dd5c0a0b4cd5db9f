"""One run at a time in a folder, and what is left of a run does not keep it."""

from __future__ import annotations

import os
import signal
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_npu.adaptors.shared import start
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import folder_lock


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = folder_lock.hold(tmp_path / "new")
    assert lock is not None
    runs, tells = os.pipe()
    child = os.fork()
    if not child:
        os.write(tells, b".")
        signal.pause()
        os._exit(0)
    os.read(runs, 1)  # what a child does first, it has done
    try:
        with pytest.raises(UsageError, match="another run is writing to --save"):
            folder_lock.hold(tmp_path / "new")
        folder_lock.release(lock)  # as the end of the parent
        again = folder_lock.hold(tmp_path / "new")
        assert again is not None
        folder_lock.release(again)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_rank_0_of_a_stock_script_holds_what_it_saves_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def initialize(rank: int) -> None:
        monkeypatch.setattr(folder_lock, "held", lambda: False)  # as in a process of its own
        start.watch(lambda: Namespace(save=str(tmp_path), rank=rank), lambda: None)

    held = set(folder_lock._held)
    initialize(0)
    try:
        initialize(1)
        with pytest.raises(UsageError, match="another run is writing to --save"):
            initialize(0)
    finally:
        for lock in folder_lock._held - held:
            folder_lock.release(lock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_who_may_only_read_the_lock_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        lock = folder_lock.hold(Path(name))
        assert lock is not None
        os.chmod(Path(name, folder_lock.NAME), 0o644)
        child = os.fork()
        if not child:
            os.setuid(12345)
            try:
                folder_lock.hold(Path(name))
            except UsageError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        folder_lock.release(lock)
