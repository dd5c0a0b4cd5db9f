"""One of several ranks: ring attention of its part of a sequence, beside the whole in fp64.

Usage: python tests/sim/ranks.py --torch 3 ring_worker.py
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices, settings
from megatron_npu.ops.attention.context_parallel.ring import ring_attention
from tests.ops.tolerances import assert_near

BATCH, HEADS, GROUPS, SIZE, CHUNK, SCALE = 2, 4, 2, 16, 5, 0.25


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention written out, ``[s, b, n, d]``."""
    key, value = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) * SCALE
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), value)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's chunks, r and 2·size - 1 - r."""
    rank, chunks = dist.get_rank(), tensor.chunk(2 * dist.get_world_size())
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def compare(dtype: torch.dtype, causal: bool) -> None:
    device = devices.current().torch_device()
    generator = torch.Generator().manual_seed(5)
    length = 2 * CHUNK * dist.get_world_size()
    shapes = [(length, BATCH, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    *tensors, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    doubles = [t.double().requires_grad_() for t in tensors]
    expected = whole(*doubles, causal)
    right = torch.autograd.grad(expected, doubles, grad.double())
    # keys and values interleaved, as a joint projection leaves them
    parts = [own(tensors[0]), *torch.stack([own(t) for t in tensors[1:]], dim=3).unbind(3)]
    parts = [t.to(device).requires_grad_() for t in parts]
    output = ring_attention(*parts, scale=SCALE, causal=causal, group=dist.group.WORLD)
    assert output.dtype is dtype
    assert output.is_contiguous()
    assert_near(output, own(expected), dtype, "output")
    ours = torch.autograd.grad(output, parts, own(grad).to(device))
    for name, a, b in zip(("query", "key", "value"), ours, right, strict=True):
        assert_near(a, own(b), dtype, f"gradient of {name}", 2.0)


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
    with counted() as counts:
        for dtype in (torch.float32, torch.bfloat16):
            for causal in (False, True):
                compare(dtype, causal)
    if counts is not None:
        launches = {name: work.calls for name, work in counts.launches.items() if "fusion_attention" in name}
        print(f"rank {rank}: {launches}, {sorted(counts.communication)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
