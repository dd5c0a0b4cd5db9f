"""Partition packed sequences over context-parallel ranks, and find the keys that each rank's queries
attend to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.ops.attention.context_parallel.visible import Document
from megatron_npu.ops.attention.spec import PackedSequences


class PackedSharding(NamedTuple):
    """The distribution of packed sequences over ranks, with the keys that are visible to this rank's queries.

    Attributes:
        sequence_order: ``[t]`` int64; indices that reorder the ranks' concatenated tokens into the order of
            the packed sequences.
        rank_order: ``[t]`` int64, the inverse: from packed order to rank order.
        visible_keys: int64, indices into the ranks' concatenated tokens: the keys that each chunk of this
            rank sees, chunk by chunk.
        packed: lengths of this rank's chunks, and of the keys that each of them sees.
    """

    sequence_order: Tensor
    rank_order: Tensor
    visible_keys: Tensor
    packed: PackedSequences


def packed_sharding(
    cu_seqlens_padded: Sequence[int],
    cu_seqlens: Sequence[int],
    tokens: int,
    causal: bool,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
) -> PackedSharding:
    """Return the distribution of packed sequences over the ranks, as tensors on ``device``.

    Args:
        cu_seqlens_padded: start of each sequence and end of the last, with padding.
        cu_seqlens: like ``cu_seqlens_padded``, but without padding.
        tokens: number of tokens on each of the ``cp_size`` ranks.
        causal: whether queries see no later keys.
        cp_size: number of ranks that share the sequences.
        cp_rank: this rank.
        device: device of the result.

    Raises:
        UsageError: the sequences do not cover all tokens, or a length is not a multiple of 2·cp.
    """
    rank_order = torch.cat([token_indices(cu_seqlens_padded, cp_size, rank) for rank in range(cp_size)])
    _check_end(cu_seqlens_padded, tokens, cp_size)
    sequence_order = torch.empty_like(rank_order)
    sequence_order[rank_order] = torch.arange(rank_order.numel())
    lengths, visible_keys = [], []
    actual = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    for (start, end), length in zip(itertools.pairwise(cu_seqlens_padded), actual, strict=True):
        chunk = (end - start) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            keys = (number + 1) * chunk if causal else length
            visible_keys.append(sequence_order[start : start + keys])
            if chunk or keys:
                lengths.append((chunk, keys))
    packed = PackedSequences(*zip(*lengths, strict=True))
    return PackedSharding(
        sequence_order.to(device), rank_order.to(device), torch.cat(visible_keys).to(device), packed
    )


def ring_documents(
    cu_seqlens_padded: Sequence[int], cu_seqlens: Sequence[int], tokens: int, size: int
) -> tuple[Document, ...]:
    """Convert packed sequences to the form that ring attention over ``size`` ranks requires.

    Args:
        cu_seqlens_padded: start of each sequence and end of the last, with padding.
        cu_seqlens: like ``cu_seqlens_padded``, but without padding.
        tokens: number of tokens on each rank.
        size: number of ranks that share the sequences.

    Raises:
        UsageError: the sequences do not cover all tokens, or a length is not a multiple of 2·size.
    """
    check_multiples(cu_seqlens_padded, size)
    _check_end(cu_seqlens_padded, tokens, size)
    padded = [end - start for start, end in itertools.pairwise(cu_seqlens_padded)]
    actual = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    return tuple(Document(p // size, a) for p, a in zip(padded, actual, strict=True))


def check_multiples(cu_seqlens: Sequence[int], cp_size: int) -> None:
    """Check that the length of each packed sequence is a multiple of twice the number of ranks.

    Raises:
        UsageError: a length is not a multiple of 2·cp.
    """
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    if any(length % (2 * cp_size) for length in lengths):
        raise UsageError(
            f"the lengths of packed sequences must be multiples of {2 * cp_size} with context-parallel size "
            f"{cp_size}, because each rank has two chunks of every sequence, but they are {lengths}. Pad "
            "the sequences and set cu_seqlens_q_padded and cu_seqlens_kv_padded."
        )


def _check_end(cu_seqlens_padded: Sequence[int], tokens: int, cp_size: int) -> None:
    if cu_seqlens_padded[-1] != tokens * cp_size:
        raise UsageError(
            f"the packed sequences end at {cu_seqlens_padded[-1]}, but each of the {cp_size} ranks has "
            f"{tokens} tokens; the two totals must be equal. Set the last boundary of cu_seqlens_q_padded "
            "to the total number of tokens."
        )


def token_indices(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Return the indices of the packed tokens that belong to a rank, ``[t / cp]`` int64, in host memory.

    Args:
        cu_seqlens: start of each sequence and end of the last, with padding.
        cp_size: number of ranks that share the sequences.
        cp_rank: the rank.

    Raises:
        UsageError: a length is not a multiple of 2·cp.
    """
    check_multiples(cu_seqlens, cp_size)
    held = []
    for start, end in itertools.pairwise(cu_seqlens):
        if end > start:
            chunks = torch.arange(start, end).chunk(2 * cp_size)
            held += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return torch.cat(held)
