"""Caches of compiled code that other users can write to are refused before code is loaded from them."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.evaluation import lm_eval_files
from megatron_npu.process import extension_locks, graph_cache
from tests.support import tiny

VARIABLES = ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in (*VARIABLES, "TRITON_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_cache_that_others_can_write_to_is_refused(tmp_path, monkeypatch, variable, mode) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv(variable, str(cache))
    graph_cache.require_own_caches()
    cache.chmod(mode)
    with pytest.raises(UsageError, match=f"Set {variable} to a folder of your own"):
        graph_cache.require_own_caches()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("name", [".triton/cache", ".cache/torch_extensions"])
def test_another_users_cache_in_the_home_folder_is_refused(tmp_path, name) -> None:
    cache = tmp_path / name
    cache.mkdir(parents=True)
    graph_cache.require_own_caches()
    os.chown(cache, 12_345, 12_345)
    with pytest.raises(UsageError, match="other users can replace"):
        graph_cache.require_own_caches()


def test_caches_that_do_not_exist_are_not_made(tmp_path) -> None:
    graph_cache.require_own_caches()
    assert not list(tmp_path.iterdir())


def test_without_a_home_folder_the_name_in_the_working_directory_is_checked(tmp_path, monkeypatch) -> None:
    """For an account of which the machine knows no name, torch and Triton read the folder ``~``."""
    monkeypatch.delenv("HOME")

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert extension_locks.stale() == []
    assert list(lm_eval_files._modules()) == []
    graph_cache.require_own_caches()
    cache = tmp_path / "~" / ".cache" / "torch_extensions"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(UsageError, match="Set TORCH_EXTENSIONS_DIR to a folder of your own"):
        graph_cache.require_own_caches()


def test_a_command_refuses_it(tmp_path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    done = tiny.run("generate", "--load", str(tmp_path), "--prompt", "1")
    assert done.returncode == 2
    assert "TRITON_CACHE_DIR" in done.stderr
