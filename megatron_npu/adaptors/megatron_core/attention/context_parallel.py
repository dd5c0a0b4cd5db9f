"""Compute attention over a sequence that is partitioned over a context-parallel group.

megatron-core splits a sequence, or each packed sequence, into 2·cp equal chunks and assigns the chunks r and
2·cp - 1 - r to rank r, which balances causal work. ``--cp-comm-type`` selects the exchange: keys and values
are passed around a ring (``p2p``, the default) or gathered (``all_gather``); each rank computes some of the
heads over the whole sequence (``a2a``; DeepSpeed-Ulysses, Jacobs et al. 2023); or near ranks use the
all-to-all and far ranks form a ring (``a2a+p2p``).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.attention.attention_mask import (
    cu_seqlens,
    packed_sequences,
    rows_are_causal,
    visible,
)
from megatron_npu.adaptors.megatron_core.attention.call import CoreAttentionCall
from megatron_npu.base.errors import UsageError
from megatron_npu.ops.attention.context_parallel.packed import (
    PackedSharding,
    packed_sharding,
    ring_documents,
    token_indices,
)
from megatron_npu.ops.attention.context_parallel.ring import ring_attention
from megatron_npu.ops.attention.context_parallel.sequence_exchange import (
    a2a_gather_heads,
    a2a_gather_sequence,
    all_gather,
    chunk_starts,
    to_rank_order,
    to_sequence_order,
)
from megatron_npu.ops.attention.context_parallel.visible import Document
from megatron_npu.ops.caching import cache_on_object, cache_on_tensor, lru_cache_tensors
from megatron_npu.ops.dispatch import report_fallback


def group_of(module: Any, packed_seq_params: Any) -> dist.ProcessGroup | None:
    """Return the context-parallel group, whose ranks share the sequences of a batch.

    Return None if this rank has whole sequences.

    Packed sequences may name their own group, or specify that one rank has all of them (``PackedSeqParams``,
    since 0.16). Otherwise, the group is that of this layer (since 0.15) or that of the whole run.
    """
    if module.layer_options.cp_comm_type is None:
        return None
    of_batch = getattr(packed_seq_params, "cp_group", None)
    if of_batch is None and getattr(packed_seq_params, "local_cp_size", None) is not None:
        return None
    group = of_batch or _group_of_layer(module)
    return group if group.size() > 1 else None


def _group_of_layer(module: Any) -> dist.ProcessGroup:
    from megatron.core import parallel_state

    of_layer = getattr(getattr(module, "pg_collection", None), "cp", None)
    return of_layer or parallel_state.get_context_parallel_group()


@contextlib.contextmanager
def draws_of_rank(dropout_p: float, group: dist.ProcessGroup) -> Iterator[None]:
    """Give the ranks of a sequence different attention dropout masks, although their random states are equal.

    The state and the rank determine the masks, so that a recomputed layer drops the same values again.
    Afterwards, the state is the same on all ranks again, and has advanced.
    """
    if dropout_p == 0.0:
        yield
        return
    device = devices.current()
    state = device.rng_state()
    digest = hashlib.blake2b(state.cpu().numpy().tobytes() + bytes([group.rank() % 256]), digest_size=7)
    device.manual_seed(int.from_bytes(digest.digest(), "big"))
    try:
        yield
    finally:
        device.set_rng_state(state)
        torch.rand(1, device=device.torch_device())


def attend(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return the attention output for this rank's two chunks of the sequence, ``[s / cp, b, n * d]``.

    Args:
        call: how the layer attends, and how its ranks share keys and values.
        group: the ranks that share the sequence.
        query, key, value: ``[s / cp, b, n or g, d]``.
        mask: ``[b, 1, s / cp, s]``, for this rank's queries, as megatron-core splits them, and all keys.
    """
    with draws_of_rank(call.dropout_p, group):
        if call.options.cp_comm_type == "a2a":
            return _a2a(call, group, query, key, value, mask)
        causal, mask = _causal_or_masked(call, group, mask, query.size(0))
        call = replace(call, causal=causal)
        if call.options.cp_comm_type in ("p2p", "a2a+p2p"):
            reason = _reason_against_a_ring(call, query.size(0) * group.size(), key, value, mask)
            if reason is None:
                return _ring(call, group, query, key, value)
            _report_no_ring(call, reason)
        return _all_gather(call, group, query, key, value, mask)


def _causal_or_masked(
    call: CoreAttentionCall, group: dist.ProcessGroup, mask: Tensor | None, tokens: int
) -> tuple[bool, Tensor | None]:
    """Return whether the attention is causal, and the mask if it does more than hide future keys."""
    if call.options.window_alone:
        return False, None
    if mask is not None and rows_are_causal(mask, chunk_starts(tokens, group)):
        return True, None
    return call.causal and mask is None, mask


def _reason_against_a_ring(
    call: CoreAttentionCall, tokens: int, key: Tensor, value: Tensor, mask: Tensor | None
) -> str | None:
    """Return the reason why ring attention cannot compute a sequence of ``tokens``, or None."""
    if mask is not None:
        return "the data loader passes a mask"
    if key.size(-1) != value.size(-1):
        return "keys and values have different head sizes"
    if devices.current().name != "cuda":
        return None
    if any(limit is not None and limit < tokens - 1 for limit in call.options.window):
        return "a window"
    return "attention dropout" if call.dropout_p else None


def _report_no_ring(call: CoreAttentionCall, reason: str) -> None:
    does = "gathers keys and values, like all_gather"
    report_fallback(
        f"--cp-comm-type {call.options.cp_comm_type}", reason, does, "Pass --cp-comm-type all_gather"
    )


def _ring(
    call: CoreAttentionCall, group: dist.ProcessGroup, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Compute ring attention over the keys of all other ranks or, with ``a2a+p2p``, of the outer group.

    Near ranks have neighboring chunks. Once they have exchanged their tokens for heads, each of them has two
    larger chunks, one after the other, as if these ranks were a single rank.
    """
    options = _ring_options(call)
    if call.options.cp_comm_type == "p2p":
        return ring_attention(query, key, value, group=group, sink=call.sink, **options).flatten(2)
    near, far = near_and_far(group)
    tensors = (to_sequence_order(a2a_gather_sequence(t, near)) for t in (query, key, value))
    heads = ring_attention(*tensors, group=far, sink=call.of_rank(near).sink, **options)
    return a2a_gather_heads(to_rank_order(heads, near.size()), near).flatten(2)


def _ring_options(call: CoreAttentionCall) -> dict[str, Any]:
    """Return the keyword arguments of ``ring_attention`` for this call."""
    return {
        "scale": call.scale,
        "dropout_p": call.dropout_p,
        "causal": call.causal,
        "window": call.options.window,
        "flags": call.options.flags,
    }


def near_and_far(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group whose ranks exchange heads, and the group whose ranks exchange keys.

    Raises:
        UsageError: upstream has not created two such groups, or the batch has its own group.
    """
    from megatron.core import parallel_state

    groups: list[dist.ProcessGroup]
    groups = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False) or []
    sizes = [each.size() for each in groups]
    if len(groups) != 2 or sizes[0] * sizes[1] != group.size():
        raise UsageError(
            "--cp-comm-type a2a+p2p requires two hierarchical groups whose sizes multiply to the "
            f"context-parallel size, {group.size()}, but their sizes are {sizes}. Pass "
            "--hierarchical-context-parallel-sizes NEAR FAR."
        )
    return groups[0], groups[1]


def _all_gather(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Compute attention after gathering the keys of all ranks.

    A causal chunk uses the keys up to its own end, without a mask.
    """
    chunk, starts = query.size(0) // 2, chunk_starts(query.size(0), group)
    key, value = (to_sequence_order(all_gather(t, group)) for t in (key, value))
    rows = (None, None) if mask is None else mask.chunk(2, dim=2)
    outputs = []
    for part, row, start in zip(query.chunk(2), rows, starts, strict=True):
        end = start + chunk if call.causal else key.size(0)
        visible_part = {"causal": call.causal, "mask": row, "offset": start}
        outputs.append(call.attend(part, key[:end], value[:end], **visible_part))
    return torch.cat(outputs)


def _a2a(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Compute attention for some of the heads over the whole sequence, after an all-to-all."""
    if mask is not None and not call.options.window_alone:
        mask = cache_on_tensor(mask, "whole", partial(_whole_mask, mask, group))
    query, key, value = (to_sequence_order(a2a_gather_sequence(t, group)) for t in (query, key, value))
    output = call.of_rank(group).attend(query, key, value, **visible(call, mask, query.size(1)))
    heads = output.unflatten(2, (query.size(2), -1))
    return a2a_gather_heads(to_rank_order(heads, group.size()), group).flatten(2)


def _whole_mask(mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the masks ``[b, 1, s / cp, s]`` for all ranks' queries into one mask ``[b, 1, s, s]``."""
    rows = mask.movedim(2, 0).to(torch.uint8)  # gloo has no bool
    return to_sequence_order(all_gather(rows, group)).movedim(0, 2).bool().contiguous()


def attend_packed(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_seq_params: Any,
) -> Tensor:
    """Return the attention output ``[t / cp, n * d]`` of packed sequences that are partitioned over the
    ranks.

    Args:
        call: how the layer attends, and how its ranks share keys and values.
        group: the ranks that share each sequence.
        query, key, value: ``[t / cp, n or g, d]``, the chunks r and 2·cp - 1 - r of each sequence.
        packed_seq_params: contains the boundaries of the whole sequences, ``[sequences + 1]``.

    Raises:
        UsageError: the length of a sequence is not a multiple of 2·cp, or keys are gathered for attention
            with a window that looks ahead.
    """
    with draws_of_rank(call.dropout_p, group):
        if call.options.cp_comm_type in ("p2p", "a2a+p2p"):
            reason = _reason_against_a_packed_ring(call, key, value)
            if reason is None:
                return _packed_ring(call, group, query, key, value, packed_seq_params)
            _report_no_ring(call, reason)
        return _attend_packed(call, group, query, key, value, packed_seq_params)


def _reason_against_a_packed_ring(call: CoreAttentionCall, key: Tensor, value: Tensor) -> str | None:
    if devices.current().name == "cuda":
        return "packed sequences"
    return _reason_against_a_ring(call, key.size(0), key, value, None)


def _packed_ring(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_seq_params: Any,
) -> Tensor:
    """Compute ring attention over packed sequences: map ``[t / cp, n, d]`` to ``[t / cp, n * d]``."""
    documents = _documents_of_batch(packed_seq_params, key.size(0), group.size())
    options = _ring_options(call)
    tensors = [query, key, value]
    if call.options.cp_comm_type == "p2p":
        tensors = [t.unsqueeze(1) for t in tensors]
        options |= {"documents": documents, "sink": call.sink}
        return ring_attention(*tensors, group=group, **options).squeeze(1).flatten(1)
    near, far = near_and_far(group)
    documents = tuple(each._replace(tokens=each.tokens * near.size()) for each in documents)
    orders = _orders_of_near(documents, near.size(), key.device)
    tensors = [a2a_gather_sequence(t, near).flatten(0, 1).index_select(0, orders[0]) for t in tensors]
    tensors = [t.unsqueeze(1) for t in tensors]
    options |= {"documents": documents, "sink": call.of_rank(near).sink}
    heads = ring_attention(*tensors, group=far, **options).squeeze(1)
    by_rank = heads.index_select(0, orders[1]).unflatten(0, (near.size(), -1))
    return a2a_gather_heads(by_rank, near).flatten(1)


def _documents_of_batch(packed_seq_params: Any, tokens: int, size: int) -> tuple[Document, ...]:
    """Return a batch's packed sequences in the form that a ring of ``size`` ranks requires.

    These sequences are computed once per batch.
    """

    def read() -> tuple[Document, ...]:
        actual = packed_seq_params.cu_seqlens_kv.flatten().tolist()
        padded = packed_seq_params.cu_seqlens_kv_padded
        return ring_documents(actual if padded is None else padded.flatten().tolist(), actual, tokens, size)

    sources = cu_seqlens(packed_seq_params)
    return cache_on_object(packed_seq_params, "documents", sources, read, (tokens, size))


@lru_cache_tensors(maxsize=8)  # the same for every layer of a batch
def _orders_of_near(
    documents: tuple[Document, ...], near: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the indices that sort the tokens of the inner group by position, and the inverse order.

    Args:
        documents: the packed sequences that the near ranks hold together.
        near: the number of near ranks.
        device: the device of the result, which is two ``[t]`` int64 tensors.
    """
    starts = [0, *itertools.accumulate(each.tokens for each in documents)]
    by_rank = torch.cat([token_indices(starts, near, rank) for rank in range(near)])
    order = torch.empty_like(by_rank)
    order[by_rank] = torch.arange(by_rank.numel())
    return order.to(device), by_rank.to(device)


def _attend_packed(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_seq_params: Any,
) -> Tensor:
    """Compute attention over packed sequences with gathered keys, or after exchanging tokens for heads."""
    sharding = sharding_of_batch(packed_seq_params, key.size(0), call.causal, group, key.device)
    if call.options.cp_comm_type == "a2a":
        tokens = sharding.sequence_order.numel()
        packed = packed_sequences(packed_seq_params, tokens, tokens)
        parts = (a2a_gather_sequence(t, group).flatten(0, 1) for t in (query, key, value))
        query, key, value = (t.index_select(0, sharding.sequence_order) for t in parts)
        output = (
            call.of_rank(group).attend_packed(query, key, value, packed).unflatten(1, (query.size(1), -1))
        )
        by_rank = output.index_select(0, sharding.rank_order).unflatten(0, (group.size(), -1))
        return a2a_gather_heads(by_rank, group).flatten(1)
    if call.options.window != (None, None) and not call.causal:
        raise UsageError(
            "packed sequences cannot be combined with a non-causal window under --cp-comm-type all_gather. "
            "Use --cp-comm-type a2a."
        )
    parts = (all_gather(t, group).flatten(0, 1) for t in (key, value))
    key, value = (t.index_select(0, sharding.visible_keys) for t in parts)
    return call.attend_packed(query, key, value, sharding.packed)


def sharding_of_batch(
    packed_seq_params: Any, tokens: int, causal: bool, group: dist.ProcessGroup, device: torch.device
) -> PackedSharding:
    """Return the partition of a batch's packed sequences, which is computed once for all layers.

    Args:
        packed_seq_params: upstream's PackedSeqParams, of which the key's boundaries are read.
        tokens: the number of tokens on this rank.
        causal: whether no query sees a later key.
        group: the ranks that share each sequence.
        device: the device for the indices.
    """
    recipe = (tokens, causal, group.size(), group.rank())

    def read() -> PackedSharding:
        actual = packed_seq_params.cu_seqlens_kv.flatten().tolist()
        padded = packed_seq_params.cu_seqlens_kv_padded
        starts = actual if padded is None else padded.flatten().tolist()
        return packed_sharding(starts, actual, *recipe, device)

    return cache_on_object(packed_seq_params, "sharding", cu_seqlens(packed_seq_params), read, recipe)
