"""One rank of the HCCL tests: runs the suites named and writes what did not fit.

Usage (by tests/sim/ranks.py): hccl_worker.py OUTPUT SUITE...

Every suite is a function without arguments; an AssertionError or any other exception is its failure. All
ranks draw from generators with the same seed, so that they agree on what to do next. The reference is gloo
on the same data, widened to 64 bits; the data are small integers, so that sums and products are exact in
every type and the results must be equal.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SUITES: dict[str, Callable[[], None]] = {}
CHUNK = 256 << 10  # kChunkBytes of csrc/hccl_segment.h; a channel holds two
SIZES = (0, 1, 3, 257, 4096, CHUNK + 12)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
REDUCED = FLOATS + SIGNED
MOVED = (*REDUCED, torch.uint8, torch.bool)
SUM, PRODUCT, MAX, MIN, AVG = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MAX,
    dist.ReduceOp.MIN,
    dist.ReduceOp.AVG,
)


def suite(function: Callable[[], None]) -> Callable[[], None]:
    SUITES[function.__name__] = function
    return function


class Group(NamedTuple):
    """The same ranks as a process group of HCCL and one of gloo."""

    ranks: list[int]
    hccl: dist.ProcessGroup
    gloo: dist.ProcessGroup


def groups() -> list[Group]:
    """Return the world, halves, neighbours that overlap, and a group in which ranks are not contiguous."""
    half = max(WORLD // 2, 1)
    members = [list(range(WORLD)), list(range(half)), list(range(half, WORLD)), list(range(0, WORLD, 2))]
    members += [[rank, rank + 1] for rank in range(min(WORLD - 1, 3))]
    return [
        Group(ranks, dist.new_group(ranks, backend="hccl"), dist.new_group(ranks, backend="gloo"))
        for ranks in members
    ]


def data(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return small integers that differ by rank: -1, 0, 1, 2, or what of it the type can hold."""
    generator = torch.Generator().manual_seed(seed * 1000 + RANK)
    low = 0 if dtype in (torch.uint8, torch.bool) else -1
    return torch.randint(low, 3, shape if isinstance(shape, tuple) else (shape,), generator=generator).to(
        dtype
    )


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host in a type that gloo reduces without rounding."""
    return tensor.cpu().to(torch.float64 if tensor.dtype.is_floating_point else torch.int64, copy=True)


def same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    found, expected = found.cpu().flatten(), expected.to(found.dtype).flatten()
    assert found.shape == expected.shape, what
    wrong = (found != expected).nonzero().flatten().tolist()
    assert not wrong, f"{what}: {len(wrong)} differ, first {found[wrong[0]]} instead of {expected[wrong[0]]}"


# ---- one function per collective: runs it on both backends and compares


def all_reduce(group: Group, size: int, dtype: torch.dtype, op: dist.ReduceOp, seed: int) -> None:
    x = data(size, dtype, seed)
    device, reference = x.npu(), wide(x)
    dist.all_reduce(device, op, group.hccl)
    dist.all_reduce(reference, SUM if op == AVG else op, group.gloo)
    same(device, reference / len(group.ranks) if op == AVG else reference, ("all_reduce", op, dtype, size))


def reduce(group: Group, size: int, dtype: torch.dtype, op: dist.ReduceOp, seed: int) -> None:
    x = data(size, dtype, seed)
    root = group.ranks[seed % len(group.ranks)]
    device, reference = x.npu(), wide(x)
    dist.reduce(device, root, op, group.hccl)
    dist.reduce(reference, root, op, group.gloo)
    if root == RANK:
        same(device, reference, ("reduce", op, dtype, size))


def reduce_scatter(group: Group, size: int, dtype: torch.dtype, op: dist.ReduceOp, seed: int) -> None:
    x = data((len(group.ranks), size), dtype, seed)
    reference, own = wide(x), group.ranks.index(RANK)
    dist.all_reduce(reference, op, group.gloo)
    out = torch.empty(size, dtype=dtype, device="npu")
    if seed % 2:
        dist.reduce_scatter_tensor(out, x.npu().flatten(), op, group.hccl)
    else:
        dist.reduce_scatter(out, list(x.npu()), op, group.hccl)
    same(out, reference[own], ("reduce_scatter", op, dtype, size))


def all_gather(group: Group, size: int, dtype: torch.dtype, op: object, seed: int) -> None:
    x = data(size, dtype, seed)
    reference = [torch.empty_like(wide(x)) for _ in group.ranks]
    dist.all_gather(reference, wide(x), group.gloo)
    if seed % 2:
        out = torch.empty(len(group.ranks) * size, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(out, x.npu(), group.hccl)
    else:
        parts = [torch.empty(size, dtype=dtype, device="npu") for _ in group.ranks]
        dist.all_gather(parts, x.npu(), group.hccl)
        out = torch.cat(parts)
    same(out, torch.cat(reference), ("all_gather", dtype, size))


def broadcast(group: Group, size: int, dtype: torch.dtype, op: object, seed: int) -> None:
    x = data(size, dtype, seed)
    root = group.ranks[seed % len(group.ranks)]
    device, reference = x.npu(), wide(x)
    dist.broadcast(device, root, group.hccl)
    dist.broadcast(reference, root, group.gloo)
    same(device, reference, ("broadcast", dtype, size))


def scatter(group: Group, size: int, dtype: torch.dtype, op: object, seed: int) -> None:
    x = data((len(group.ranks), size), dtype, seed)
    root = group.ranks[seed % len(group.ranks)]
    out, reference = torch.empty(size, dtype=dtype, device="npu"), torch.empty(size, dtype=wide(x).dtype)
    dist.scatter(out, list(x.npu()) if root == RANK else None, root, group.hccl)
    dist.scatter(reference, list(wide(x)) if root == RANK else None, root, group.gloo)
    same(out, reference, ("scatter", dtype, size))


def gather(group: Group, size: int, dtype: torch.dtype, op: object, seed: int) -> None:
    x = data(size, dtype, seed)
    root = group.ranks[seed % len(group.ranks)]
    parts = [torch.empty(size, dtype=dtype, device="npu") for _ in group.ranks] if root == RANK else None
    reference = [torch.empty_like(wide(x)) for _ in group.ranks] if root == RANK else None
    dist.gather(x.npu(), parts, root, group.hccl)
    dist.gather(wide(x), reference, root, group.gloo)
    if parts and reference:
        same(torch.cat(parts), torch.cat(reference), ("gather", dtype, size))


def all_to_all(group: Group, size: int, dtype: torch.dtype, op: object, seed: int) -> None:
    """Rank i sends rank j some multiple of ``size``, 0 included; even seeds send equal parts."""
    count, own = len(group.ranks), group.ranks.index(RANK)
    draw = random.Random(seed)
    matrix = [[1 if seed % 2 == 0 else draw.randrange(3) for _ in range(count)] for _ in range(count)]
    outgoing = [size * times for times in matrix[own]]
    incoming = [size * row[own] for row in matrix]
    x = data(sum(outgoing), dtype, seed)
    out, reference = (
        torch.empty(sum(incoming), dtype=dtype, device="npu"),
        torch.empty(sum(incoming), dtype=wide(x).dtype),
    )
    if seed % 4 < 2:
        dist.all_to_all_single(out, x.npu(), incoming, outgoing, group.hccl)
    else:
        parts = list(torch.empty(sum(incoming), dtype=dtype, device="npu").split(incoming))
        dist.all_to_all(parts, list(x.npu().split(outgoing)), group.hccl)
        out = torch.cat(parts)
    dist.all_to_all_single(reference, wide(x), incoming, outgoing, group.gloo)
    same(out, reference, ("all_to_all", dtype, size, matrix))


def barrier(group: Group, size: int, dtype: torch.dtype, op: object, seed: int) -> None:
    dist.barrier(group.hccl)


MOVING = (all_gather, broadcast, scatter, gather, all_to_all, barrier)
REDUCING = (all_reduce, reduce, reduce_scatter)


def reductions(dtype: torch.dtype, *, average: bool) -> tuple[dist.ReduceOp, ...]:
    """Return what HCCL reduces a type with: no product of int16 and bf16; torch averages floats only."""
    ops = [SUM, MAX, MIN]
    if dtype not in (torch.int16, torch.bfloat16):
        ops.append(PRODUCT)
    if average and dtype.is_floating_point:
        ops.append(AVG)
    return tuple(ops)


# ---- the suites


@suite
def random_sequence(steps: int = min(150, 400 // WORLD)) -> None:
    """Collectives drawn at random, on groups that overlap; fewer where many ranks share the cores."""
    draw = random.Random(20)
    for step in range(steps):
        group = draw.choice(ALL)
        collective = draw.choice(REDUCING + MOVING)
        dtype = draw.choice(REDUCED if collective in REDUCING else MOVED)
        op = draw.choice(reductions(dtype, average=collective is all_reduce))
        size = draw.choice(SIZES)
        if RANK in group.ranks:
            collective(group, size, dtype, op, seed=step)


@suite
def short_random_sequence() -> None:
    random_sequence(steps=30)


@suite
def every_type() -> None:
    world = ALL[0]
    for dtype in REDUCED:
        for op in reductions(dtype, average=False):
            for seed, collective in enumerate(REDUCING):
                collective(world, 33, dtype, op, seed)
        for op in reductions(dtype, average=True):
            all_reduce(world, 33, dtype, op, seed=5)
    for dtype in MOVED:
        for seed in range(4):
            for collective in MOVING:
                collective(world, 33, dtype, None, seed)
    for dtype in (torch.uint8, torch.bool):  # torch_npu reduces them as int32
        all_reduce(world, 33, dtype, SUM if dtype == torch.uint8 else MAX, seed=1)


@suite
def larger_than_the_segment() -> None:
    size = (3 << 20) // 4 + 1  # floats: more than a channel holds, and no multiple of anything
    for seed, collective in enumerate(REDUCING + MOVING):
        collective(ALL[0], size, torch.float32, SUM, seed)


@suite
def uneven_lists() -> None:
    """All-gather and reduce-scatter with one size per rank, one of them 0."""
    sizes = [rank * 3 % 7 for rank in range(WORLD)]
    contents = [torch.full((size,), float(rank)) for rank, size in enumerate(sizes)]
    parts = [torch.empty(size, device="npu") for size in sizes]
    dist.all_gather(parts, contents[RANK].npu())
    for part, content in zip(parts, contents, strict=True):
        same(part, content, "uneven all_gather")
    out = torch.empty(sizes[RANK], device="npu")
    dist.reduce_scatter(out, [torch.full((size,), float(RANK), device="npu") for size in sizes])
    same(out, torch.full((sizes[RANK],), sum(range(WORLD))), "uneven reduce_scatter")


@suite
def uneven_lists_in_one_call() -> None:
    """The same where torch_npu has functions for it (Atlas A3): one call instead of one per rank."""
    from megatron_npu.sim import counting

    with counting() as counts:
        out = [torch.empty(rank + 1, device="npu") for rank in range(WORLD)]
        dist.all_gather(out, torch.full((RANK + 1,), float(RANK), device="npu"))
        same(
            torch.cat(out), torch.cat([torch.full((rank + 1,), rank) for rank in range(WORLD)]), "all_gather"
        )
        uneven_lists()
    assert counts.communication["AllGatherV"].calls >= 1, counts.communication
    assert counts.communication["ReduceScatterV"].calls >= 1, counts.communication


@suite
def reduction_in_the_order_of_ranks() -> None:
    """Floats of all magnitudes: every rank gets the bits of (x0 + x1) + x2 ..., by either algorithm."""
    for size in (1000, 100_003):  # below and above kDirectBytes of csrc/hccl_collectives.cpp
        for dtype in FLOATS:
            parts = [
                (torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10 ** (rank % 3)).to(
                    dtype
                )
                for rank in range(WORLD)
            ]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()  # 16-bit types accumulate in fp32
            x = parts[RANK].npu()
            dist.all_reduce(x)
            same(x, total.to(dtype), ("order", dtype, size))


@suite
def not_a_number_and_infinity() -> None:
    for dtype in FLOATS:
        x = torch.tensor([float("nan"), float("inf"), 1.0, 60000.0], dtype=dtype)
        if RANK:
            x = torch.tensor([1.0, 1.0, float("nan"), 60000.0], dtype=dtype)
        for op in (SUM, MAX, MIN):
            device = x.npu()
            dist.all_reduce(device, op)
            found = device.cpu()
            assert found[0].isnan(), (dtype, op, found)
            assert found[2].isnan(), (dtype, op, found)
            assert found[1] == (1 if op == MIN else float("inf")), (dtype, op, found)
            overflows = dtype == torch.float16 and op == SUM
            assert found[3].isinf() == overflows, (dtype, op, found)


def matchings(draw: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Yield ``count`` messages (from, to) among the ranks."""
    for _ in range(count):
        yield tuple(draw.sample(range(WORLD), 2))  # type: ignore[misc]


def message(number: int) -> torch.Tensor:
    """Return the content of message ``number``; most are small, some are larger than a channel."""
    size = 150_000 if number % 97 == 0 else number * 7 % 50
    return torch.full((size,), float(number)) + torch.arange(size) % 5


@suite
def a_thousand_interleavings() -> None:
    """Asynchronous sends and receives: each pair keeps its order, the pairs are interleaved at random."""
    draw = random.Random(7)
    for first in range(0, 1000, 50):  # at most 50 under way
        pending, received = [], []
        for number, (source, target) in enumerate(matchings(draw, 50), first):
            if source == RANK:
                pending.append(dist.isend(message(number).npu(), target))
            if target == RANK:
                received.append((number, torch.empty_like(message(number), device="npu")))
                pending.append(dist.irecv(received[-1][1], source))
        random.Random(first + RANK).shuffle(pending)
        for work in pending:
            work.wait()
        for number, tensor in received:
            same(tensor, message(number), ("message", number))


@suite
def batches() -> None:
    """batch_isend_irecv in any order of its items; one item per peer and direction, as HCCL wants it."""
    draw = random.Random(11)
    for round_number in range(100):
        pairs = set(matchings(draw, 2 * WORLD))
        items, received = [], []
        for source, target in sorted(pairs):
            number = round_number * 1000 + source * 30 + target
            if source == RANK:
                items.append(dist.P2POp(dist.isend, message(number).npu(), target))
            if target == RANK:
                received.append((number, torch.empty_like(message(number), device="npu")))
                items.append(dist.P2POp(dist.irecv, received[-1][1], source))
        random.Random(round_number * WORLD + RANK).shuffle(items)
        for work in dist.batch_isend_irecv(items) if items else []:
            work.wait()
        for number, tensor in received:
            same(tensor, message(number), ("batch", number))


@suite
def blocking_send_and_receive() -> None:
    for dtype in MOVED:
        x = data(100, dtype, 3)
        if RANK == 0:
            dist.send(x.npu(), 1)
        elif RANK == 1:
            y = torch.empty(100, dtype=dtype, device="npu")
            dist.recv(y, 0)
            generator = torch.Generator().manual_seed(3000)
            low = 0 if dtype in (torch.uint8, torch.bool) else -1
            same(y, torch.randint(low, 3, (100,), generator=generator).to(dtype), ("recv", dtype))


@suite
def objects_and_data_parallel() -> None:
    gathered: list[object] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": RANK})
    assert gathered == [{"rank": rank} for rank in range(WORLD)]
    content = [RANK, "text"]
    dist.broadcast_object_list(content, src=1)
    assert content == [1, "text"]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).npu(), device_ids=[RANK])
    model(torch.randn(4, 8).npu()).square().mean().backward()
    gradient = model.module.weight.grad
    first = gradient.clone()
    dist.broadcast(first, 0)
    same(gradient, first.cpu(), "gradients of data parallelism")


@suite
def coalesced() -> None:
    x, y = torch.ones(4, device="npu"), torch.full((6,), 2.0, device="npu")
    with dist._coalescing_manager(device=torch.device("npu", RANK)):
        dist.all_reduce(x)
        dist.all_reduce(y)
    torch.npu.synchronize()
    same(x, torch.full((4,), WORLD), "coalesced 1")
    same(y, torch.full((6,), 2 * WORLD), "coalesced 2")


def ready() -> torch.Tensor:
    """Return ones, after a copy of them: what a first one takes must not be part of the delay."""
    x = torch.ones(1000, device="npu")
    x.clone()
    torch.npu.synchronize()
    return x


@suite
def without_wait_the_data_are_old() -> None:
    """Run with a delay: what is read before wait() has not been reduced yet; afterwards it has."""
    x = ready()
    work = dist.all_reduce(x, async_op=True)
    early = x.clone()
    work.wait()
    late = x.clone()
    torch.npu.synchronize()
    same(early, torch.ones(1000), "before wait")
    same(late, torch.full((1000,), WORLD), "after wait")


@suite
def other_streams_wait_for_themselves() -> None:
    """wait() makes the current stream wait, not the others and not the host."""
    x, side = ready(), torch.npu.Stream()
    work = dist.all_reduce(x, async_op=True)
    with torch.npu.stream(side):
        work.wait()
    assert not work.is_completed(), "wait() must not block the host"
    early = x.clone()
    with torch.npu.stream(side):
        late = x.clone()
    torch.npu.synchronize()
    same(early, torch.ones(1000), "the main stream did not wait")
    same(late, torch.full((1000,), WORLD), "the side stream did")


@suite
def side_stream_reduces_twice() -> None:
    """Reduce as several instances of the distributed optimizer do: shards, then each shard across instances.

    Both on one side stream, without a handle: whoever waits for that stream waits for both.
    """
    x, side, across = ready(), torch.npu.Stream(), dist.new_group(backend="hccl")
    shard = x.view(WORLD, -1)[RANK]
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side), dist._coalescing_manager(dist.group.WORLD, async_ops=False):
        dist.reduce_scatter_tensor(shard, x)
    with torch.npu.stream(side), dist._coalescing_manager(across, async_ops=False):
        dist.all_reduce(shard, group=across)
    early = shard.clone()
    torch.npu.current_stream().wait_stream(side)
    late = shard.clone()
    torch.npu.synchronize()
    assert not (early == WORLD**2).any(), "the main stream did not wait yet"
    same(late, torch.full_like(late, WORLD**2).cpu(), "then it did")


@suite
def counters() -> None:
    from megatron_npu.sim import counters as of_simulator

    with of_simulator.counting() as counts:
        dist.all_reduce(torch.ones(1000, device="npu"))
        dist.all_reduce(torch.ones(8, device="npu", dtype=torch.bfloat16))
        dist.all_to_all_single(torch.empty(4 * WORLD, device="npu"), torch.ones(4 * WORLD, device="npu"))
    found = {name: (work.calls, work.bytes) for name, work in counts.communication.items()}
    assert found.pop("AllReduce") == (2, 4 * 1000 + 2 * 8), found
    assert [*found.values()] == [(1, 4 * 4 * WORLD)], found


@suite
def groups_and_buffers() -> None:
    """Calls and bytes of each group, and the memory that its communicator's two buffers take."""
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    from megatron_npu.sim import counting

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 32}
    narrow = dist.new_group(pg_options=options, group_desc="NARROW")
    dist.all_reduce(torch.ones(10, device="npu"), group=narrow)
    with counting() as counts:
        dist.all_reduce(torch.ones(1000, device="npu"), group=narrow)
        dist.all_reduce(torch.ones(10, device="npu"), group=narrow)
    group = counts.groups["NARROW"]
    assert (group.ranks, group.calls, group.bytes, group.largest) == (WORLD, 2, 4040, 4000), group
    assert group.buffer == 2 * 32 << 20, group
    assert counts.groups["default_pg"].buffer == 2 * 200 << 20, counts.groups
    assert counts.groups["default_pg"].calls == 0, counts.groups
    assert counts.buffers == sum(each.buffer for each in counts.groups.values()) >= 464 << 20
    dist.destroy_process_group(narrow)
    with counting() as counts:
        pass
    assert all(each.buffer != 2 * 32 << 20 for each in counts.groups.values()), counts.groups


@suite
def products_that_communicate() -> None:
    """One operation has the bits and the bytes of product and collective; another communicator is refused."""
    import torch_npu

    from megatron_npu.sim import counting

    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(RANK)
    generator = torch.Generator().manual_seed(RANK)
    rows = torch.randn(2 * WORLD, 256, generator=generator).bfloat16().npu()
    factor = torch.randn(24, 256, generator=generator).bfloat16().npu().t()  # transposed, as a weight is
    gathered, product = rows.new_empty(2 * WORLD**2, 256), rows @ factor
    part, total = product.new_empty(2, 24), product.clone()
    with counting() as apart:
        dist.all_gather_into_tensor(gathered, rows)
        dist.reduce_scatter_tensor(part, product)
        dist.all_reduce(total)
    with counting() as fused:
        multiplied, kept = torch_npu.npu_all_gather_base_mm(rows, factor, name, WORLD)
        _, nothing = torch_npu.npu_all_gather_base_mm(rows, factor, name, WORLD, gather_output=False)
        scattered = torch_npu.npu_mm_reduce_scatter_base(rows, factor, name, WORLD)
        added = torch_npu.npu_mm_all_reduce_base(rows, factor, name)
    same(kept, gathered.cpu(), "gathered")
    same(multiplied, (gathered @ factor).cpu(), "product of what is gathered")
    same(scattered, part.cpu(), "a part of the sum of products")
    same(added, total.cpu(), "the sum of products")
    assert nothing.numel() == 0
    assert fused.communication.pop("AllGather").bytes == 2 * apart.communication.pop("AllGather").bytes
    assert fused.communication == apart.communication, (fused.communication, apart.communication)
    assert fused.total_launches == 4, fused.launches
    with pytest.raises(RuntimeError, match="communicator nobody"):
        torch_npu.npu_mm_reduce_scatter_base(rows, factor, "nobody", WORLD)


def main() -> None:
    global ALL
    output, names = Path(sys.argv[1]), sys.argv[2:]
    torch.npu.set_device(RANK)
    dist.init_process_group(
        "hccl", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=RANK, world_size=WORLD
    )
    assert type(dist.group.WORLD._get_backend(torch.device("npu"))).__name__ == "ProcessGroupHCCL"
    dist.barrier()  # the world's communicator exists before those that may be derived from it
    ALL = groups()
    outcomes = {}
    for name in names:
        started = time.monotonic()
        try:
            SUITES[name]()
            outcomes[name] = ""
        except Exception:  # the text is the result; the other suites still tell something
            outcomes[name] = traceback.format_exc()
        print(f"rank {RANK}: {name} {time.monotonic() - started:.2f} s", flush=True)
        (output / f"{RANK}.json").write_text(json.dumps(outcomes))
        if outcomes[name]:
            break  # ranks may be out of step from here on
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
