"""Attention of a sequence that is cut over the ranks of a context-parallel group.

megatron-core cuts a sequence, or each document of packed ones, into 2·cp equal chunks and gives rank r the
chunks r and 2·cp - 1 - r, so that causal work is balanced. Keys and values go round in a ring
(``--cp-comm-type p2p``, the default), are gathered (``all_gather``), or sequences are exchanged for heads
(``a2a``; DeepSpeed-Ulysses, Jacobs et al. 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.errors import UsageError
from megatron_npu.hosts.megatron_core.visibility import (
    boundaries,
    documents,
    rows_are_causal,
    visible,
    window_is_all,
)
from megatron_npu.ops.attention import Packed, Window
from megatron_npu.ops.attention.ring import ring_attention
from megatron_npu.ops.dispatch import report_refusal
from megatron_npu.ops.kept import kept_on, kept_with

Attend = Callable[..., Tensor]
Communication = Literal["ring", "gather", "exchange"]


def communication_of(config: Any, cp_comm_type: str | None) -> Communication | None:
    """Return how the ranks share a layer's keys and values; None where the sequence is not cut.

    Args:
        config: the TransformerConfig.
        cp_comm_type: of this layer; None is the ring, as in TransformerEngine. ``a2a+p2p``, which exchanges
            heads among near ranks and keys among far ones, runs as a ring over all, which is reported.

    Raises:
        UsageError: another name; or ``a2a``, and there are heads, or groups of them, that cannot be dealt out
            evenly.
    """
    if config.context_parallel_size == 1:
        return None
    if cp_comm_type == "a2a+p2p":
        report_refusal(
            "--cp-comm-type a2a+p2p",
            "hierarchical context parallelism is not here",
            "runs as one ring over all ranks",
            "Give --cp-comm-type p2p",
        )
    if cp_comm_type in (None, "p2p", "a2a+p2p"):
        return "ring"
    if cp_comm_type in ("all_gather", "allgather"):  # the one in the configuration, the other in the help
        return "gather"
    if cp_comm_type == "a2a":
        _check_heads(config)
        return "exchange"
    raise UsageError(
        f"--cp-comm-type {cp_comm_type}",
        "p2p, all_gather, a2a or a2a+p2p",
        "Name one, or one for each layer.",
    )


def _check_heads(config: Any) -> None:
    size = config.context_parallel_size * config.tensor_model_parallel_size
    groups = config.num_query_groups or config.num_attention_heads
    if groups % size:
        raise UsageError(
            f"--cp-comm-type a2a with {groups} heads of keys on {size} ranks",
            "a multiple of the tensor-parallel times the context-parallel size",
            "Use --cp-comm-type all_gather.",
        )


def attend_in_a_ring(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    attend: Attend,
    *,
    scale: float,
    window: Window,
    dropout_p: float,
) -> Tensor:
    """As ``attend_to_gathered``, which is what runs where a ring cannot; no rank holds everyone's keys.

    Args:
        scale, window, dropout_p: what ``attend`` is bound to.
    """
    group = _group()
    sees, rest = _what_is_seen(module, mask, causal, group, query.size(0))
    tokens = query.size(0) * group.size()
    reason = None
    if rest is not None:
        reason = "the mask of the data loader"
    elif any(limit is not None and limit < tokens - 1 for limit in window):
        reason = "a window"
    elif dropout_p:
        reason = "attention dropout"
    elif key.size(3) != value.size(3):
        reason = "keys and values of different head sizes"
    if reason is not None:
        _report_no_ring(reason)
        return attend_to_gathered(module, query, key, value, mask, causal, attend)
    return ring_attention(query, key, value, scale=scale, causal=sees, group=group).flatten(2)


def attend_to_gathered(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, attend: Attend
) -> Tensor:
    """Attention of this rank's two chunks of the sequence over everyone's keys.

    Where a chunk is causal it attends to the keys up to its own end: no mask is built, nothing after the
    diagonal is computed.

    Args:
        query, key, value: ``[s / cp, b, n or g, d]``.
        mask: ``[b, 1, s / cp, s]``: of this rank's queries, as megatron-core cuts it, and of all keys.
        attend: ``ops.attention`` with what the module decides, ``[sq, b, n, d]`` to ``[sq, b, n * d]``.
    """
    group = _group()
    chunk, starts = query.size(0) // 2, _starts(group, query.size(0))
    causal, mask = _what_is_seen(module, mask, causal, group, query.size(0))
    key, value = (_in_order(_Gather.apply(t, group)) for t in (key, value))
    rows = (None, None) if mask is None else mask.chunk(2, dim=2)
    outputs = []
    for part, row, start in zip(query.chunk(2), rows, starts, strict=True):
        end = start + chunk if causal else key.size(0)
        outputs.append(attend(part, key[:end], value[:end], causal=causal, mask=row, offset=start))
    return torch.cat(outputs)


def _report_no_ring(reason: str) -> None:
    does = "gathers keys and values, as all_gather does"
    report_refusal("--cp-comm-type p2p", reason, does, "Give --cp-comm-type all_gather")


def _starts(group: dist.ProcessGroup, tokens: int) -> tuple[int, int]:
    """Return where in the sequence the two chunks of this rank's tokens begin."""
    size, rank, chunk = group.size(), group.rank(), tokens // 2
    return rank * chunk, (2 * size - 1 - rank) * chunk


def _what_is_seen(
    module: Any, mask: Tensor | None, causal: bool, group: dist.ProcessGroup, tokens: int
) -> tuple[bool, Tensor | None]:
    """Return whether queries see no later key, and the mask, if it says more than that."""
    if window_is_all(module):
        return False, None
    if mask is not None and rows_are_causal(mask, _starts(group, tokens)):
        return True, None
    return causal and mask is None, mask


def attend_with_own_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, attend: Attend
) -> Tensor:
    """As ``attend_to_gathered``; this rank computes a part of the heads, over the whole sequence."""
    group = _group()
    if mask is not None and not window_is_all(module):
        mask = kept_with(mask, "whole", lambda: _whole_mask(mask, group))
    query, key, value = (_in_order(_exchange_for_sequence(t, group)) for t in (query, key, value))
    output = attend(query, key, value, **visible(module, mask, causal, query.size(1)))
    heads = output.unflatten(2, (query.size(2), -1))
    return _exchange_for_heads(_by_rank(heads, group.size()), group).flatten(2)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_seq_params: Any,
    causal: bool,
    limited: bool,
    communication: Communication,
    attend: Attend,
) -> Tensor:
    """Attention of packed documents, each of which is cut over the ranks.

    Args:
        query, key, value: ``[t / cp, n or g, d]``: of each document its chunks r and 2·cp - 1 - r.
        packed_seq_params: with the boundaries of the whole documents, ``[documents + 1]``.
        limited: whether there is a window.
        communication: a ring of documents is not here; their keys and values are gathered, which is reported.
        attend: ``ops.attention`` for TND with what the module decides, to ``[tq, n * d]``.

    Raises:
        UsageError: a document is not a multiple of 2·cp long, or has a window and looks ahead.
    """
    group = _group()
    plan = _plan_of(packed_seq_params, key.size(0), causal, group, key.device)
    if communication == "exchange":
        whole = documents(packed_seq_params, *[plan.order.numel()] * 2)
        parts = (_exchange_for_sequence(t, group).flatten(0, 1) for t in (query, key, value))
        query, key, value = (t.index_select(0, plan.order) for t in parts)
        output = attend(query, key, value, packed=whole).unflatten(1, (query.size(1), -1))
        by_rank = output.index_select(0, plan.rank_order).unflatten(0, (group.size(), -1))
        return _exchange_for_heads(by_rank, group).flatten(1)
    if communication == "ring":
        _report_no_ring("packed sequences")
    if limited and not causal:
        raise UsageError(
            "packed sequences, a window and no causal mask under --cp-comm-type all_gather",
            "two of the three",
            "Use --cp-comm-type a2a.",
        )
    key, value = (_Gather.apply(t, group).flatten(0, 1).index_select(0, plan.keys) for t in (key, value))
    return attend(query, key, value, packed=plan.parts)


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


def _plan_of(
    packed_seq_params: Any, tokens: int, causal: bool, group: dist.ProcessGroup, device: torch.device
) -> Plan:
    """Return the plan, made once per batch: every layer is handed the same parameters."""
    recipe = (tokens, causal, group.size(), group.rank())

    def read() -> Plan:
        actual = packed_seq_params.cu_seqlens_kv.flatten().tolist()
        padded = packed_seq_params.cu_seqlens_kv_padded
        starts = actual if padded is None else padded.flatten().tolist()
        return _plan(starts, actual, *recipe, device)

    return kept_on(packed_seq_params, "plan", boundaries(packed_seq_params), read, recipe)


def _plan(
    starts: list[int],
    actual: list[int],
    tokens: int,
    causal: bool,
    size: int,
    rank: int,
    device: torch.device,
) -> Plan:
    """Lay out documents that begin at ``starts`` (the last is the end), ``actual`` ends without padding."""
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


def _group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def _in_order(by_rank: Tensor) -> Tensor:
    """Bring ``[cp, s / cp, ...]`` chunks r, 2·cp - 1 - r into the order of the sequence, ``[s, ...]``."""
    first, second = by_rank.unflatten(1, (2, -1)).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def _by_rank(sequence: Tensor, size: int) -> Tensor:
    """Bring ``[s, ...]`` into the chunks of each rank, ``[cp, s / cp, ...]``."""
    first, second = sequence.unflatten(0, (2, size, -1)).unbind(0)
    return torch.cat([first, second.flip(0)], dim=1)


def _whole_mask(mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[b, 1, s / cp, s]`` of each rank's queries to ``[b, 1, s, s]``."""
    rows = mask.movedim(2, 0).to(torch.uint8)  # gloo has no bool
    return _in_order(_Gather.apply(rows, group)).movedim(0, 2).bool().contiguous()


def _exchange_for_sequence(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[s / cp, ..., n, d]`` to ``[cp, s / cp, ..., n / cp, d]``: every rank's tokens, this rank's heads."""
    heads = part.unflatten(-2, (group.size(), -1)).movedim(-3, 0)
    return _Exchange.apply(heads, group)


def _exchange_for_heads(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse: ``[cp, s / cp, ..., n / cp, d]`` to ``[s / cp, ..., n, d]``."""
    return _Exchange.apply(by_rank, group).movedim(0, -3).flatten(-3, -2)


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
