"""Collectives of ranks on one machine through memory that they share: sums, who takes that way, and ends."""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu import devices
from megatron_npu.devices import gloo_or_shared_memory, shared_memory_collectives
from megatron_npu.devices.redirect import Redirection
from tests.conftest import LONGEST

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memfd_create")
RANKS = 3
LARGE = 3 * 30_000  # elements of fp32: more than gloo is left with
SMALL_CHUNK = 3 * 256  # bytes: many stages of few elements


def rank_of_all(rank: int, folder: Path) -> None:
    """Be one of the ranks; write what it has seen as JSON."""
    torch.set_num_threads(1)
    Redirection(devices.CpuDevice()).on()
    timeout = datetime.timedelta(seconds=LONGEST)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=RANKS, timeout=timeout)
    seen = {
        "wrong": list(_wrong_sums(rank)),
        "ways": _ways(rank),
        "names": _names_of_memory(),
        "kept": _kept_after_destruction(),
        "without": _without_memory(rank),
        "end": _when_a_peer_dies(rank, folder),
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # the group has lost a rank


def _wrong_sums(rank: int) -> Iterator[str]:
    """Yield what differs from gloo's: sizes around a part's, aliases, dtypes, in a random order."""
    segment = shared_memory_collectives.Segment(dist.group.WORLD, SMALL_CHUNK)
    same, own = random.Random(7), torch.Generator().manual_seed(rank)
    for number in range(150):
        kind, size, alias = same.randrange(3), same.randint(1, 1500), same.random() < 0.5
        dtype = same.choice([torch.float32, torch.bfloat16, torch.int64])
        given = torch.randint(-40, 40, (size * RANKS,), generator=own).to(dtype)  # exact in bfloat16
        mine = slice(rank * size, (rank + 1) * size)
        if kind == 0:
            given = given[:size].clone()
            found, expected = given.clone(), _sum(given)
            segment.all_reduce(found)
        elif kind == 1:
            expected, source = _sum(given)[mine], given.clone()
            found = source[mine] if alias else torch.empty(size, dtype=dtype)
            segment.reduce_scatter(found, source)
        else:
            parts = [torch.empty(size, dtype=dtype) for _ in range(RANKS)]
            dist.all_gather(parts, given[mine].clone())
            expected, found = torch.cat(parts), given.clone()
            segment.all_gather(found, found[mine] if alias else given[mine])
        if not found.equal(expected):
            yield f"{number}: {('sum', 'scatter', 'gather')[kind]} of {size} {dtype}, alias {alias}"


def _sum(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(parts, tensor)
    return torch.stack(parts).sum(0).to(tensor.dtype)


def _ways(rank: int) -> dict[str, Any]:
    """Return for each call whether it went through memory, and whether its numbers are right."""
    ones, total = torch.ones(LARGE), float(sum(range(1, RANKS + 1)))

    def reduced(tensor: Tensor, expected: float = total, **options: Any) -> bool:
        work = dist.all_reduce(tensor.mul_(rank + 1), **options)
        if work is not None:
            work.wait()
        return bool((tensor == expected).all())

    def coalesced(asynchronous: bool) -> bool:
        first, second = ones * (rank + 1), torch.full((5,), rank + 1.0)
        with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in (first, second):
                dist.all_reduce(tensor, async_op=asynchronous)
        if asynchronous:
            manager.wait()
        return bool((first == total).all() and (second == total).all())

    def scattered() -> bool:
        shard = torch.empty(LARGE // RANKS)
        dist.reduce_scatter_tensor(shard, ones * (rank + 1))
        return bool((shard == total).all())

    def gathered() -> bool:
        whole = torch.empty(LARGE)
        dist.all_gather_into_tensor(whole.view(RANKS, -1), torch.full((LARGE // RANKS,), float(rank)))
        return whole.view(RANKS, -1).mean(1).tolist() == list(range(RANKS))

    def unequal(asynchronous: bool) -> bool:
        parts = [torch.zeros(size) for size in range(RANKS)]
        work = dist.all_gather(parts, torch.full((rank,), rank + 1.0), async_op=asynchronous)
        if asynchronous:
            work.wait()
        return [part.tolist() for part in parts] == [[size + 1.0] * size for size in range(RANKS)]

    def of_a_parameter() -> bool:
        weight = torch.nn.Parameter(ones * (rank + 1))
        dist.all_reduce(weight)
        return bool((weight == total).all())

    calls = {
        "large": lambda: reduced(ones.clone()),
        "in another order": lambda: reduced(torch.ones(300, LARGE // 300).t()),
        "parameter": of_a_parameter,
        "coalesced": lambda: coalesced(False),
        "scattered": scattered,
        "gathered": gathered,
        "small": lambda: reduced(torch.ones(100)),
        "asynchronous": lambda: reduced(ones.clone(), async_op=True),
        "coalesced, asynchronous": lambda: coalesced(True),
        "largest": lambda: reduced(ones.clone(), expected=RANKS, op=dist.ReduceOp.MAX),
        "unequal": lambda: unequal(False),
        "unequal, asynchronous": lambda: unequal(True),
        "complex": lambda: reduced(ones.to(torch.complex64)),
    }
    return {name: _watched(call) for name, call in calls.items()}


def _watched(call: Callable[[], bool]) -> tuple[bool, bool]:
    """Return whether a call has moved the segment of the group on, and what it returns."""
    before = _stage()
    right = call()
    return _stage() > before, right


def _stage() -> int:
    segment = gloo_or_shared_memory._segments.get(dist.group.WORLD)
    return segment._stage if segment else 0


def _names_of_memory() -> dict[str, list[str]]:
    """Return under which names the shared memory is mapped, and what of it a folder shows."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "mapped": sorted({line.split(None, 5)[5][:20] for line in maps if "megatron_npu-" in line}),
        "left": [name for name in os.listdir("/dev/shm") if "megatron_npu" in name],
    }


def _kept_after_destruction() -> list[int]:
    """Return how many segments there are with a second group, and after that is gone."""
    group = dist.new_group(list(range(RANKS)))
    dist.all_reduce(torch.ones(LARGE), group=group)
    numbers = [len(gloo_or_shared_memory._segments)]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return [*numbers, len(gloo_or_shared_memory._segments)]


def _without_memory(rank: int) -> dict[str, Any]:
    """Return the sum, and what is told, where one rank cannot map it or the user wants none."""
    told: list[str] = []
    gloo_or_shared_memory.logger.warning = lambda text, *values: told.append(text % values)  # type: ignore[method-assign]
    original = shared_memory_collectives._open
    if rank == 1:
        shared_memory_collectives._open = lambda *_: original(os.getpid(), 0, 0)  # a stranger's descriptor
    sums = []
    for setting in "10":
        os.environ["MEGATRON_NPU_SHARED_MEMORY"] = setting
        tensor, group = torch.ones(LARGE), dist.new_group(list(range(RANKS)))
        dist.all_reduce(tensor, group=group)
        sums.append(float(tensor.mean()))
    return {"sums": sums, "told": told, "made": gloo_or_shared_memory._segments[group] is not None}


def _when_a_peer_dies(rank: int, folder: Path) -> str:
    """Return how a collective ends whose last rank is dead."""
    dist.barrier()
    if rank == RANKS - 1:
        (folder / f"{rank}.json").write_text("{}")
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(LARGE))
    except RuntimeError:
        return "an error"
    return "a sum"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, warm_children: None) -> list[dict[str, Any]]:
    """What each rank has seen but the last, which dies."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_of_all, args=(rank, folder)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LONGEST)
        process.kill()  # one that hangs must not outlive the test
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS - 1)]


def test_sums_are_those_of_gloo(seen) -> None:
    assert [rank["wrong"] for rank in seen] == [[], []]


def test_large_ones_that_are_waited_for_go_through_memory(seen) -> None:
    gloos = {"small", "asynchronous", "coalesced, asynchronous", "largest", "complex"}
    gloos |= {"unequal", "unequal, asynchronous"}
    for rank in seen:
        assert {name: way for name, (way, _) in rank["ways"].items()} == {
            name: name not in gloos for name in rank["ways"]
        }
        assert all(right for _, right in rank["ways"].values()), rank["ways"]


def test_nothing_has_a_name_that_could_be_left_behind(seen) -> None:
    for rank in seen:
        assert rank["names"] == {"mapped": ["/memfd:megatron_npu-"], "left": []}


def test_memory_goes_with_its_group(seen) -> None:
    assert [rank["kept"] for rank in seen] == [[2, 1], [2, 1]]


def test_without_shared_memory_gloo_sends_and_that_is_told(seen) -> None:
    assert [rank["without"]["sums"] for rank in seen] == [[RANKS, RANKS]] * 2
    assert not any(rank["without"]["made"] for rank in seen)
    (line,) = seen[0]["without"]["told"]  # once, not for the user's own choice
    assert f"2 of {RANKS} ranks mapped the shared memory" in line
    assert seen[1]["without"]["told"] == []


def test_a_dead_peer_is_an_error(seen) -> None:
    assert [rank["end"] for rank in seen] == ["an error", "an error"]
