"""Compiled graphs are kept in a folder of this user alone, and read from no other: commands' defaults."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.model import compiled_blocks
from megatron_npu.process import graph_cache
from tests.support import processes, tiny

ANOTHER = 12345  # some other user
SCRIPT = Path(__file__).resolve().parent / "scripts" / "compiled.py"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def planted(tmp_path) -> Path:
    """Torch's own folder in a private /tmp, made by another user before."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    folder = temporary / "torchinductor_root"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, ANOTHER, ANOTHER)
    return folder


def command(planted: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    home = planted.parents[1]
    env = {name: value for name, value in tiny.environment().items() if name != graph_cache.VARIABLE}
    env |= {"HOME": str(home), "TMPDIR": str(planted.parent), "USER": "root", "LOGNAME": "root"}
    env |= {"MEGATRON_NPU_COMPILED": "0"}
    env.pop("XDG_CACHE_HOME", None)
    return processes.run(
        [sys.executable, "-m", "megatron_npu", *arguments],
        env=env | variables,
        capture_output=True,
        text=True,
    )


def assert_ours(planted: Path) -> None:
    """Assert that the graphs are in the private folder, and none where another user has made one."""
    folder = planted.parents[1] / ".cache" / "megatron_npu" / "inductor"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.rglob("*.so"))
    assert list(planted.iterdir()) == []


@needs_root
def test_train_reads_no_folder_of_another(planted):
    line = f"train --user-script {SCRIPT} --graph-optimization --nproc-per-node 1"
    done = command(planted, *line.split(), "--train-iters", "1")
    assert done.returncode == 0, done.stderr
    assert_ours(planted)


@needs_root
def test_the_ranks_of_bench_are_given_the_private_folder(planted):
    """Compiling its rows takes minutes: an interpreter that tells what it is given stands for the ranks."""
    told = planted.parents[1] / "told"
    interpreter = planted.parents[1] / "python"
    interpreter.write_text(f'#!/bin/sh\necho "${graph_cache.VARIABLE}" >> {told}\nexit 1\n')
    interpreter.chmod(0o755)
    line = "bench --suite graph --model 2x32x4 --seq-length 16 --vocab-size 256 --devices 1 --steps 1"
    command(planted, *line.split(), "--repeat", "1", PYTHON_EXEC=str(interpreter))
    folder = planted.parents[1] / ".cache" / "megatron_npu" / "inductor"
    assert {*told.read_text().split()} == {str(folder)}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_root
def test_a_folder_that_is_named_is_taken_if_it_is_the_user_s(planted):
    other = planted.parents[1] / "other"
    other.mkdir()
    os.chown(other, ANOTHER, ANOTHER)
    done = command(planted, *"train --train-iters 1".split(), TORCHINDUCTOR_CACHE_DIR=str(other))
    assert done.returncode == 2
    assert f"{other} belongs to user {ANOTHER}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_another_folder_cannot_be_put_in_its_place(tmp_path, monkeypatch):
    everyones = tmp_path / "everyones"
    everyones.mkdir()
    everyones.chmod(0o777)
    monkeypatch.setenv(graph_cache.VARIABLE, str(everyones / "graphs"))
    with pytest.raises(UsageError, match="other users can replace this folder"):
        graph_cache.claim()


def test_no_home_is_no_reason_to_take_torch_s_folder(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(graph_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv(graph_cache.VARIABLE, str(tmp_path / "torchinductor_root"))  # as torch leaves it
    assert graph_cache.claim() == tmp_path / f"megatron_npu_inductor_{os.geteuid()}"
    assert os.environ[graph_cache.VARIABLE] == str(graph_cache.claim())


def test_a_folder_that_is_mounted_noexec_is_not_taken(tmp_path, monkeypatch):
    """Found by the campaign: torch cannot load its graphs there, which ended ``train`` with a traceback."""
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    real = os.fstatvfs

    def statvfs(descriptor: int) -> os.statvfs_result:
        found = real(descriptor)
        there = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flag = found.f_flag | os.ST_NOEXEC if closed in (there, *there.parents) else found.f_flag
        return os.statvfs_result([*found[:8], flag, *found[9:]])

    monkeypatch.setattr(os, "fstatvfs", statvfs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.delenv(graph_cache.VARIABLE, raising=False)
    monkeypatch.setattr(graph_cache.tempfile, "gettempdir", lambda: str(other))
    closed = home
    assert graph_cache.claim().parent == other
    model = torch.nn.Linear(2, 2)
    assert compiled_blocks.compile_blocks(model, dynamic=False).startswith("graphs: ")
    closed = tmp_path
    with pytest.raises(UsageError, match=rf"mounted noexec.*Set {graph_cache.VARIABLE} to a folder on"):
        compiled_blocks.compile_blocks(model, dynamic=False)


@needs_root
def test_the_members_of_a_group_cannot_put_another_folder_in_its_place(tmp_path, monkeypatch):
    team = tmp_path / "team"
    team.mkdir()
    os.chown(team, 0, ANOTHER)
    monkeypatch.setenv(graph_cache.VARIABLE, str(team / "graphs"))
    team.chmod(0o3775)  # sticky: only its owner can rename the folder
    graph_cache.claim()
    team.chmod(0o2775)
    with pytest.raises(UsageError, match="other users can replace this folder"):
        graph_cache.claim()
