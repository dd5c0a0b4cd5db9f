"""Process groups that tests leave as garbage end with their threads, and all of them share one that wakes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import conftest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted on Linux only")
MANY = conftest._IDLE + 20  # each has a thread; some of earlier tests may end meanwhile


def _loops() -> int:
    """Return the number of threads that look for messages."""
    return [(each / "comm").read_text("ascii").strip() for each in conftest._THREADS.iterdir()].count(
        "gloo_tcp_loop"
    )


@pytest.fixture
def threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Leave many groups in a cycle; give the threads before and with them, and how many new ones wake."""
    loops, before = _loops(), len(os.listdir(conftest._THREADS))
    monkeypatch.setitem(conftest._left_over, "threads", before)
    gc.disable()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    cycle: list[object] = [dist.new_group([0]) for _ in range(MANY)]
    cycle.append(cycle)
    dist.destroy_process_group()
    del cycle
    yield [before, len(os.listdir(conftest._THREADS)), _loops() - loops]
    gc.enable()
    gc.collect()


def test_garbage_is_collected(threads: list[int]) -> None:
    before, with_groups, _ = threads
    assert with_groups - before > conftest._IDLE
    conftest._end_idle_threads()
    assert len(os.listdir(conftest._THREADS)) <= before + 3
    assert conftest._left_over["threads"] <= before + 3


def test_all_of_them_share_the_thread_that_wakes(threads: list[int]) -> None:
    """A hundred times per second; by default, each group has one."""
    before, with_groups, loops = threads
    assert loops <= 1
    assert with_groups - before > conftest._IDLE


def test_a_group_of_a_cached_embedding_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
    before = len(os.listdir(conftest._THREADS))
    monkeypatch.setattr(conftest, "_IDLE", 0)
    monkeypatch.setitem(conftest._left_over, "threads", before)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    embedding = embeddings.RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=dist.new_group([0]))
    embedding(4)
    del embedding
    dist.destroy_process_group()
    gc.collect()
    assert len(os.listdir(conftest._THREADS)) > before
    conftest._end_idle_threads()
    assert len(os.listdir(conftest._THREADS)) <= before


def test_a_few_are_left_to_the_collector(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before, with_groups, _ = threads
    monkeypatch.setattr(conftest, "_IDLE", with_groups)
    conftest._end_idle_threads()
    assert len(os.listdir(conftest._THREADS)) == with_groups
    assert conftest._left_over["threads"] == before
