"""Launch an Adam step for many tensors, which can also scale gradients and write 16-bit weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.triton.launching import is_fake, launch

_BLOCK = 2048
_ALIGNED = 16  # bytes of the widest load
_NARROW = {None: 0, torch.bfloat16: 1, torch.float16: 2}


class Numbers(NamedTuple):
    """Scalar arguments of the Adam kernel, in the order of the kernel's parameters.

    The kernel documents their meaning.
    """

    factor: float
    decay: float
    l2: float
    keep1: float
    new1: float
    keep2: float
    new2: float
    size_of_step: float
    root: float
    eps: float


class Tensors(NamedTuple):
    """The tensors of one parameter: fp32 tensors to update in place, and an optional 16-bit copy of the
    weight.
    """

    weight: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    copy: Tensor | None


class _Table(NamedTuple):
    """Tables in device memory that describe many tensors to the kernel.

    Attributes:
        addresses, sizes, firsts, owners: see the kernel.
        blocks: the number of blocks.
        aligned: whether all addresses are multiples of 16 bytes.
    """

    addresses: Tensor
    sizes: Tensor
    firsts: Tensor
    owners: Tensor
    blocks: int
    aligned: bool


def takes(row: Tensors) -> bool:
    """Return True if the Adam kernel supports a parameter."""
    exact = (row.weight, row.grad, row.first, row.second)
    shape, device = row.weight.shape, row.weight.device
    if row.copy is not None and row.copy.dtype not in _NARROW:
        return False
    return all(t.dtype is torch.float32 for t in exact) and all(
        t.is_contiguous() and t.device == device and t.shape == shape and not is_fake(t)
        for t in (*exact, *(() if row.copy is None else (row.copy,)))
    )


def update(rows: Sequence[Tensors], numbers: Numbers) -> None:
    """Perform one Adam step for supported parameters, which must all be on the same device."""
    from megatron_npu.ops.triton.kernels import adam as kernels

    by_copy: dict[torch.dtype | None, list[Tensors]] = {}
    for row in rows:
        by_copy.setdefault(None if row.copy is None else row.copy.dtype, []).append(row)
    for dtype, chosen in by_copy.items():
        narrow, device = _NARROW[dtype], chosen[0].weight.device
        addresses = tuple(0 if t is None else t.data_ptr() for row in chosen for t in row)
        table = _table(addresses, tuple(row.weight.numel() for row in chosen), device)
        launch(
            *(kernels.step, (table.blocks,), chosen[0].weight),
            *(*table[:4], *numbers, narrow, table.aligned, _BLOCK),
            num_warps=8,
        )


@functools.lru_cache(maxsize=32)  # of each step the same, as a rule
def _table(addresses: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> _Table:
    counts = torch.tensor([-(-size // _BLOCK) for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    firsts = counts.cumsum(0) - counts
    aligned = all(address % _ALIGNED == 0 for address in addresses)
    with torch.inference_mode(False):
        return _Table(
            torch.tensor(addresses).to(device),
            torch.tensor(sizes).to(device),
            firsts.to(device),
            owners.to(device),
            int(owners.numel()),
            aligned,
        )
