"""A sequence that is cut over ranks: gathered, or exchanged for heads, and brought into order.

The balanced order of megatron-core: a sequence is cut into 2·cp equal chunks, and rank r has the chunks r and
2·cp - 1 - r, one behind the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def starts_of_chunks(tokens: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Return where in the sequence the two chunks of this rank's ``tokens`` begin."""
    size, rank, chunk = group.size(), group.rank(), tokens // 2
    return rank * chunk, (2 * size - 1 - rank) * chunk


def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[s / cp, ...]`` of each to ``[cp, s / cp, ...]`` on all; gradients are summed where they belong."""
    return _Gather.apply(part, group)


def exchange_for_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[s / cp, ..., n, d]`` to ``[cp, s / cp, ..., n / cp, d]``: every rank's tokens, this rank's heads.

    DeepSpeed-Ulysses, Jacobs et al. 2023.
    """
    heads = part.unflatten(-2, (group.size(), -1)).movedim(-3, 0)
    return _Exchange.apply(heads, group)


def exchange_for_heads(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse: ``[cp, s / cp, ..., n / cp, d]`` to ``[s / cp, ..., n, d]``."""
    return _Exchange.apply(by_rank, group).movedim(0, -3).flatten(-3, -2)


def in_order(by_rank: Tensor) -> Tensor:
    """Bring ``[cp, s / cp, ...]``, the chunks of each rank, into the order of the sequence, ``[s, ...]``."""
    first, second = by_rank.unflatten(1, (2, -1)).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def by_rank(sequence: Tensor, size: int) -> Tensor:
    """Bring ``[s, ...]`` into the chunks of each rank, ``[cp, s / cp, ...]``."""
    first, second = sequence.unflatten(0, (2, size, -1)).unbind(0)
    return torch.cat([first, second.flip(0)], dim=1)


class _Gather(torch.autograd.Function):
    """All-gather along a new first dimension; backward sums each rank's gradients where they belong."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        output = input.new_empty((group.size(), *input.shape))
        dist.all_gather_into_tensor(output.flatten(0, 1), input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        output = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(output, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return output, None


class _Exchange(torch.autograd.Function):
    """All-to-all along the first dimension ``[cp, ...]``; its gradient is another."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        dist.all_to_all_single(output, input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None
