"""A lock that nobody holds is told from one of a compilation that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

from megatron_npu import extension_locks


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


def test_a_stale_lock_is_removed_and_a_held_one_is_left(cache):
    held, left = lock_of(cache, "held"), lock_of(cache, "left")
    baton = FileBaton(str(held))
    assert baton.try_acquire()
    left.touch()
    assert extension_locks.stale() == [left]
    assert extension_locks.remove_stale() == [left]
    assert held.exists()
    baton.release()
    assert extension_locks.stale() == []


def test_the_cache_is_torchs(cache, monkeypatch):
    assert extension_locks.folder() in _parents(_get_build_directory("one", verbose=False))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    assert extension_locks.folder() in _parents(_get_build_directory("two", verbose=False))


def _parents(path):
    return Path(path).parents
