"""The simulator's cache: a wheel and libraries that are used by their paths, so nobody may replace it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.planning.fake_cuda import library
from megatron_npu.planning.ranks import Ranks
from megatron_npu.process import user_cache
from megatron_npu.sim import cache, site


def test_another_folder_cannot_be_put_in_its_place(tmp_path: Path, monkeypatch) -> None:
    everyones = tmp_path / "everyones"
    everyones.mkdir()
    everyones.chmod(0o777)
    monkeypatch.setenv("MEGATRON_NPU_SIM_CACHE", str(everyones / "cache"))
    with pytest.raises(UsageError, match=r"the simulator's cache: .* other users can replace this folder"):
        cache.prepared("site", lambda folder: None)
    everyones.chmod(0o1777)  # sticky: only its owner can rename the folder
    assert cache.prepared("site", lambda folder: None) == everyones / "cache" / "site"


def test_a_cache_that_is_mounted_noexec_is_told_in_one_line(tmp_path: Path, monkeypatch) -> None:
    """Found by the campaign: ``plan`` showed the traceback of a rank."""
    monkeypatch.setenv("MEGATRON_NPU_SIM_CACHE", str(tmp_path / "cache"))
    found = os.statvfs(tmp_path)
    fields = [*found[:8], found.f_flag | os.ST_NOEXEC, *found[9:]]
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: os.statvfs_result(fields))
    monkeypatch.setattr(library, "_build", lambda folder: pytest.fail("it has been compiled"))
    with pytest.raises(UsageError, match=r"mounted noexec.*Set another folder with MEGATRON_NPU_SIM_CACHE"):
        library.built()


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_a_build_for_cuda_is_told_before_torch_npu_aborts(tmp_path: Path, monkeypatch, cuda) -> None:
    """PyPI's torch for Linux on x86-64: "Duplicated key 'pinned_reserve_segment_size_mb'", SIGABRT."""
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "version.py").write_text(f"__version__ = '2.13.0+cu130'\ncuda: Optional[str] = {cuda!r}\n")
    monkeypatch.setattr(site, "torch_directory", lambda: torch)
    monkeypatch.setenv("MEGATRON_NPU_SIM_SITE", str(tmp_path))
    if cuda:
        with pytest.raises(UsageError, match="plan --device cuda requires the CPU build of torch, but"):
            Ranks.on("cuda")
        assert "CUDA 13.0" in (library.unavailable() or "")
    told = (
        r"simulator requires the CPU build of torch, but torch 2\.13\.0\+cu130 in .* CUDA 13\.0"
        if cuda
        else "contains torch_npu"
    )
    with pytest.raises(UsageError, match=told):
        site.prepare()


def test_a_hidden_proc_is_told_in_one_line_before_there_are_ranks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_NPU_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_DESCRIPTORS", str(tmp_path / "hidden"))
    monkeypatch.setattr(library, "_build", lambda folder: pytest.fail("it has been compiled"))
    with pytest.raises(UsageError, match=r"the simulator's cache: .*hidden does not exist, .*Mount /proc"):
        library.built()


def test_the_library_of_fake_cuda_is_one_that_only_this_user_can_write(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_NPU_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_build", lambda folder: (folder / "hooks.so").write_bytes(b"no library"))
    path = library.built()
    assert path.stat().st_mode & 0o777 == user_cache.PRIVATE
    path.chmod(0o666)
    with pytest.raises(UsageError, match="others may write to it"):
        cache.load(path)


def test_a_compiler_that_fails_is_told_in_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_NPU_SIM_CACHE", str(tmp_path / "cache"))
    failed = subprocess.CompletedProcess([], 1, "", "noise\nhooks.cpp: fatal error: no space\n")
    monkeypatch.setattr(library.subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(UsageError, match=r"cannot compile the fake CUDA library: hooks\.cpp: fatal error"):
        library.built()
