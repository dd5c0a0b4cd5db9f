"""A lock that nobody holds is told from one of a compilation that goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

from megatron_npu import plugin
from megatron_npu.adaptors.deepspeed import flags_and_runs
from megatron_npu.adaptors.shared import rendezvous
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import run
from megatron_npu.pretrain.run import pretrain
from megatron_npu.process import deepspeed_device, extension_locks


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache, empty."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def lock_of(cache, name):
    """Return the file that torch locks an extension by."""
    place = cache / "py_cpu" / name
    place.mkdir(parents=True)
    return place / "lock"


def test_a_stale_lock_is_removed_and_a_held_one_is_left(cache, capsys):
    held, left = lock_of(cache, "held"), lock_of(cache, "left")
    baton = FileBaton(str(held))
    assert baton.try_acquire()
    left.touch()
    assert extension_locks.stale() == [left]
    assert extension_locks.remove_stale("who") == [left]
    assert capsys.readouterr().err == f"who: removed the stale lock {left}\n"
    assert held.exists()
    baton.release()
    assert extension_locks.stale() == []


def test_a_stock_script_finds_none(cache, monkeypatch, capsys, tmp_path):
    """In the words of the command that starts it; other ranks of its machine leave that to the first."""
    left = lock_of(cache, "share_storage_ext")
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(plugin, "install", lambda: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for rank in ("1", "0"):
        left.touch()
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert run.main([str(script)]) == 0
        assert left.exists() == (rank == "1")
    assert capsys.readouterr().err == f"megatron-npu run: removed the stale lock {left}\n"


@pytest.mark.parametrize("trains", [True, False])
def test_the_driver_finds_none_and_bad_flags_change_nothing(cache, monkeypatch, trains):
    left = lock_of(cache, "share_storage_ext")
    left.touch()
    there = []
    monkeypatch.setattr(pretrain, "train", lambda args: there.append(left.exists()))
    if trains:
        monkeypatch.setattr(pretrain.arguments, "parse", lambda argv: None)
        assert pretrain.main([]) == 0
        assert there == [False]
    else:
        with pytest.raises(UsageError):
            pretrain.main(["--no-such-flag"])
        assert left.exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_megatron_deepspeed_waits_for_none(cache, monkeypatch, rank):
    """The first rank of a machine removes it, when no rank can compile yet."""
    left = lock_of(cache, "cpu_adam")
    left.touch()
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "provide_address", lambda: None)
    monkeypatch.setattr(deepspeed_device, "compile_nothing", lambda: None)
    there = []
    flags_and_runs.meet(lambda: there.append(left.exists()))
    assert there == [rank != "0"]


def test_the_cache_is_torchs(cache, monkeypatch):
    assert extension_locks.folder() in _parents(_get_build_directory("one", verbose=False))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    assert extension_locks.folder() in _parents(_get_build_directory("two", verbose=False))


def _parents(path):
    return Path(path).parents
