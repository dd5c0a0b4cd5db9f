"""Packed documents, each of which is cut over ranks: which tokens a rank has, and what they see."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.errors import UsageError
from megatron_npu.ops.attention.spec import Packed


class Plan(NamedTuple):
    """How the tokens of packed documents lie on the ranks, and what this rank's see.

    Attributes:
        order: ``[t]``, where the tokens of the packed sequence lie when ranks' parts follow one another.
        rank_order: ``[t]``, its inverse.
        keys: the tokens among ranks' parts that each half document of this rank sees, one after another.
        parts: lengths of the half documents, and of the keys that each sees.
    """

    order: Tensor
    rank_order: Tensor
    keys: Tensor
    parts: Packed


def plan_of(
    starts: list[int],
    actual: list[int],
    tokens: int,
    causal: bool,
    size: int,
    rank: int,
    device: torch.device,
) -> Plan:
    """Lay out documents that begin at ``starts`` (the last is the end) and, without padding, at ``actual``.

    Args:
        tokens: on each of ``size`` ranks.
        causal: no query sees a later key.

    Raises:
        UsageError: the documents are not all tokens, or one of them is not a multiple of 2·cp long.
    """
    rank_order = torch.cat([tokens_of_rank(starts, size, other) for other in range(size)])
    if rank_order.numel() != tokens * size:
        raise UsageError(
            f"packed documents that end at {starts[-1]}, and {tokens} tokens on each of {size} ranks",
            "the same number of tokens in both",
            "Let the last boundary of cu_seqlens_q_padded be the end of the tokens.",
        )
    order = torch.empty_like(rank_order)
    order[rank_order] = torch.arange(rank_order.numel())
    queries, keys, seen = [], [], []
    for i in range(len(starts) - 1):
        chunk = (starts[i + 1] - starts[i]) // (2 * size)
        for part in (rank, 2 * size - 1 - rank):
            length = (part + 1) * chunk if causal else actual[i + 1] - actual[i]
            queries.append(chunk)
            keys.append(length)
            seen.append(order[starts[i] : starts[i] + length])
    pairs = [pair for pair in zip(queries, keys, strict=True) if any(pair)]
    parts = Packed(*zip(*pairs, strict=True))
    return Plan(order.to(device), rank_order.to(device), torch.cat(seen).to(device), parts)


def tokens_of_rank(starts: list[int], size: int, rank: int) -> Tensor:
    """Return which tokens of packed documents a rank holds, ``[t / cp]`` int64, on the host.

    Args:
        starts: where the documents begin; the last is the end.

    Raises:
        UsageError: a document is not a multiple of 2·cp long.
    """
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if any(length % (2 * size) for length in lengths):
        raise UsageError(
            f"packed documents of {lengths} tokens, context-parallel size {size}",
            f"multiples of {2 * size}: each rank has two chunks of each",
            "Pad the documents and set cu_seqlens_q_padded and cu_seqlens_kv_padded.",
        )
    chunks = []
    for start, length in zip(starts, lengths, strict=False):
        document = torch.arange(start, start + length).chunk(2 * size)
        chunks += [document[rank], document[2 * size - 1 - rank]] if length else []
    return torch.cat(chunks)
