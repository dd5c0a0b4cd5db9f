"""Gather a partitioned sequence, exchange its tokens for heads (all-to-all), and reorder its tokens.

In megatron-core's load-balanced order, a sequence is split into 2·cp equal chunks, and rank r has chunks r
and 2·cp - 1 - r, concatenated. "By rank" refers to the shape ``[cp, s / cp, ...]``, which contains the chunks
of each rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def chunk_starts(tokens: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the start positions of this rank's two chunks in the whole sequence."""
    size, rank, chunk = group.size(), group.rank(), tokens // 2
    return rank * chunk, (2 * size - 1 - rank) * chunk


def all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the parts ``[s / cp, ...]`` of all ranks into a tensor ``[cp, s / cp, ...]``.

    The backward pass reduce-scatters the gradient.
    """
    return _AllGather.apply(part, group)


def a2a_gather_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens for heads before attention, and return the tokens of all ranks for this rank's heads.

    Source: DeepSpeed-Ulysses, Jacobs et al. 2023.

    Args:
        part: ``[s / cp, ..., n, d]``; cp divides n.
        group: the ranks that share the sequence.

    Returns:
        ``[cp, s / cp, ..., n / cp, d]``.
    """
    by_head = part.unflatten(-2, (group.size(), -1)).movedim(-3, 0)
    return _AllToAll.apply(by_head, group)


def a2a_gather_heads(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange heads for tokens after attention, and return this rank's tokens for all heads.

    The input is ``[cp, s / cp, ..., n / cp, d]``.
    """
    return _AllToAll.apply(by_rank, group).movedim(0, -3).flatten(-3, -2)


def to_sequence_order(by_rank: Tensor) -> Tensor:
    """Reorder the ranks' parts ``[cp, s / cp, ...]`` into sequence order ``[s, ...]``."""
    first, second = by_rank.unflatten(1, (2, -1)).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def to_rank_order(sequence: Tensor, cp_size: int) -> Tensor:
    """Undo ``to_sequence_order``: reorder ``[s, ...]`` to ``[cp, s / cp, ...]``."""
    first, second = sequence.unflatten(0, (2, cp_size, -1)).unbind(0)
    return torch.cat([first, second.flip(0)], dim=1)


class _AllGather(torch.autograd.Function):
    """Differentiable all-gather along a new first dimension.

    The backward pass sums each gradient on the rank that owns it.
    """

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


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all along the first dimension of ``[cp, ...]``.

    The gradient is another all-to-all.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        dist.all_to_all_single(output, input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None
