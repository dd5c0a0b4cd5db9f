"""One of several ranks: ring attention of its part of a sequence, beside the whole in fp64.

Usage: python tests/sim/ranks.py --torch 3 ring_worker.py
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.ops.attention.context_parallel.ring import ring_attention
from megatron_npu.ops.attention.context_parallel.visible import Document
from megatron_npu.ops.attention.spec import Window
from tests.support.tolerances import assert_near

BATCH, HEADS, GROUPS, SIZE, CHUNK, SCALE = 2, 4, 2, 16, 5, 0.25


class Case(NamedTuple):
    """What is visible: besides the triangle, a window; packed sequences by their chunk's length."""

    causal: bool
    window: Window = (None, None)
    chunks: tuple[int, ...] = (CHUNK,)


CASES = (
    Case(False),
    Case(True),
    Case(True, (4, 0)),
    Case(False, (7, 2)),
    Case(True, chunks=(1, 3, 1)),
    Case(False, chunks=(2, 3)),
    Case(True, (6, 0), (1, 3, 1)),
)


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, case: Case) -> torch.Tensor:
    """Attention written out, ``[s, b, n, d]``."""
    key, value = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) * SCALE
    position = torch.arange(scores.size(-1))
    ahead = position - position[:, None]
    left, right = (scores.size(-1) if limit is None else limit for limit in case.window)
    hidden = (ahead < -left) | (ahead > (min(right, 0) if case.causal else right))
    ends = torch.tensor(case.chunks).cumsum(0) * 2 * dist.get_world_size()
    document = torch.bucketize(position, ends, right=True)
    scores = scores.masked_fill(hidden | (document[:, None] != document), float("-inf"))
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), value)


def own(tensor: torch.Tensor, case: Case) -> torch.Tensor:
    """Return this rank's chunks, r and 2·size - 1 - r, of each document."""
    rank, size = dist.get_rank(), dist.get_world_size()
    held = []
    for document in tensor.split([2 * size * chunk for chunk in case.chunks]):
        chunks = document.chunk(2 * size)
        held += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(held)


def compare(dtype: torch.dtype, case: Case) -> None:
    device = devices.current().torch_device()
    generator = torch.Generator().manual_seed(5)
    length = 2 * CHUNK * dist.get_world_size()
    batch = BATCH if len(case.chunks) == 1 else 1
    shapes = [(length, batch, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    *tensors, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    doubles = [t.double().requires_grad_() for t in tensors]
    expected = whole(*doubles, case)
    right = torch.autograd.grad(expected, doubles, grad.double())
    # keys and values interleaved, as a joint projection leaves them
    parts = [own(tensors[0], case), *torch.stack([own(t, case) for t in tensors[1:]], dim=3).unbind(3)]
    parts = [t.to(device).requires_grad_() for t in parts]
    documents = [Document(2 * chunk, 2 * chunk * dist.get_world_size()) for chunk in case.chunks]
    limits = {"causal": case.causal, "window": case.window, "documents": documents}
    output = ring_attention(*parts, scale=SCALE, group=dist.group.WORLD, **limits)
    assert output.dtype is dtype
    assert output.is_contiguous()
    assert_near(output, own(expected, case), dtype, "output")
    ours = torch.autograd.grad(output, parts, own(grad, case).to(device))
    for name, a, b in zip(("query", "key", "value"), ours, right, strict=True):
        assert_near(a, own(b, case), dtype, f"gradient of {name}", 2.0)


def compare_dropout() -> None:
    """Values that are unit vectors show which weights each rank has dropped; the rest is autograd's."""
    case, device, size = Case(True, (17, 0)), devices.current(), dist.get_world_size()
    place, length = device.torch_device(), 2 * CHUNK * size
    generator = torch.Generator().manual_seed(7)
    query, key, value, grad = (torch.randn(length, 1, 2, length, generator=generator) for _ in range(4))
    unit = torch.eye(length)[:, None, None].expand(value.shape)
    device.manual_seed(11 + dist.get_rank())
    state = device.rng_state()
    found = []
    for values in (unit, value):
        device.set_rng_state(state)
        parts = [own(t, case).to(place).requires_grad_() for t in (query, key, values)]
        limits = {"causal": True, "window": case.window, "dropout_p": 0.25}
        found.append(ring_attention(*parts, scale=SCALE, group=dist.group.WORLD, **limits))
    kept = [torch.empty_like(found[0]) for _ in range(size)]
    dist.all_gather(kept, (found[0].detach() != 0).float() / 0.75)
    places = [torch.arange(length).chunk(2 * size) for _ in range(size)]
    order = torch.cat([torch.cat([p[r], p[-1 - r]]) for r, p in enumerate(places)])
    factors = torch.empty(length, 1, 2, length)
    factors[order] = torch.cat(kept).cpu()
    position = torch.arange(length)
    hidden = (position > position[:, None]) | (position < position[:, None] - 17)
    assert abs(float((factors != 0).sum() / (~hidden).sum() / 2) - 0.75) < 0.1
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    scores = torch.einsum("ibnd,jbnd->bnij", *leaves[:2]) * SCALE
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1) * factors.permute(1, 2, 0, 3)
    expected = torch.einsum("bnij,jbnd->ibnd", weights, leaves[2])
    assert_near(found[1], own(expected, case), torch.float32, "output with dropout")
    right = torch.autograd.grad(expected, leaves, grad.double())
    ours = torch.autograd.grad(found[1], parts, own(grad, case).to(place))
    for name, a, b in zip(("query", "key", "value"), ours, right, strict=True):
        assert_near(a, own(b, case), torch.float32, f"gradient of {name} with dropout", 2.0)


def counted() -> contextlib.AbstractContextManager[Any]:
    """Return what counts launches and communication on simulated NPUs, and nothing elsewhere."""
    if not settings.SIM.enabled():
        return contextlib.nullcontext()
    from megatron_npu.sim.counters import counting

    return counting()


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = devices.current()
    if device.name != "cpu":
        torch.get_device_module(device.name).set_device(int(os.environ["LOCAL_RANK"]))
    store = f"file://{Path(os.environ['RENDEZVOUS'])}"
    dist.init_process_group(device.backend, init_method=store, rank=rank, world_size=size)
    for number, case in enumerate(CASES):
        with counted() as counts:
            compare(torch.float32, case)
        compare(torch.bfloat16, case)
        if counts is not None:
            launches = {n.split("_", 1)[1]: w.calls for n, w in counts.launches.items() if "fusion_att" in n}
            sent = counts.total_communication
            ways = sorted(counts.communication)
            print(f"case {number}, rank {rank}: {launches}, {ways}, {sent.bytes} bytes", flush=True)
    compare_dropout()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
