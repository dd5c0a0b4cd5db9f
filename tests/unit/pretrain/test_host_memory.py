"""Memory is asked for before it is filled, in a container as well."""

from __future__ import annotations

import resource

import psutil
import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.run import host_memory


def group(folder, limit: object, used: int, cached: int = 0):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    return folder


def test_the_limit_of_a_container_counts(tmp_path):
    assert host_memory.available(group(tmp_path, 10_000, 7_000, 500)) == 3_500
    assert host_memory.available(group(tmp_path, 10_000, 12_000)) == 0


def test_without_a_limit_the_system_s_memory_counts(tmp_path, monkeypatch):
    class System:
        available = 12_345

    monkeypatch.setattr(psutil, "virtual_memory", System)
    assert host_memory.available(tmp_path) == 12_345
    assert host_memory.available(group(tmp_path, "max", 1)) == 12_345
    assert host_memory.available(group(tmp_path, 1 << 60, 1)) == 12_345


def test_a_limit_of_the_process_counts(tmp_path, monkeypatch):
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + (100 << 20), -1))
    assert 0 < host_memory.available(tmp_path) <= 120 << 20


def test_too_little_is_one_line(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 1_500_000_000)
    host_memory.require(1_500_000_000, "x")
    with pytest.raises(UsageError, match=r"x needs 2\.0 GB of memory, but only 1\.5 GB are available"):
        host_memory.require(2_000_000_000, "x")
