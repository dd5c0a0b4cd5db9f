"""Attention of a sequence that is cut over the ranks of a context-parallel group.

megatron-core cuts a sequence, or each of the packed ones, into 2·cp equal chunks and gives rank r the chunks
r and 2·cp - 1 - r, so that causal work is balanced. As ``--cp-comm-type`` says, keys and values go round in a
ring (``p2p``, the default) or are gathered (``all_gather``), or each rank gets some of the heads, over the
whole sequence (``a2a``; DeepSpeed-Ulysses, Jacobs et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.adaptors.megatron_core.attention.attention_mask import (
    cu_seqlens,
    packed_sequences,
    rows_are_causal,
    visible,
)
from megatron_npu.adaptors.megatron_core.attention.call import CoreAttentionCall
from megatron_npu.errors import UsageError
from megatron_npu.ops.attention.context_parallel.packed import PackedSharding, packed_sharding
from megatron_npu.ops.attention.context_parallel.ring import ring_attention
from megatron_npu.ops.attention.context_parallel.sequence import (
    a2a_gather_heads,
    a2a_gather_sequence,
    all_gather,
    chunk_starts,
    to_rank_order,
    to_sequence_order,
)
from megatron_npu.ops.caching import cache_on_object, cache_on_tensor
from megatron_npu.ops.dispatch import report_fallback


def group_of(module: Any, packed_seq_params: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share a batch's sequences; None where this rank has them whole.

    Packed sequences may name a group of their own, or say that one rank has them all (``PackedSeqParams``,
    since 0.16). Else they are those of this layer (0.15 on), or of the whole run.
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


def attend(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return attention of this rank's two chunks of the sequence, ``[s / cp, b, n * d]``.

    Args:
        call: how the layer attends, and how its ranks share keys and values.
        group: the ranks that share the sequence.
        query, key, value: ``[s / cp, b, n or g, d]``.
        mask: ``[b, 1, s / cp, s]``: of this rank's queries, as megatron-core cuts it, and of all keys.
    """
    if call.options.cp_comm_type == "a2a":
        return _a2a(call, group, query, key, value, mask)
    causal, mask = _causal_or_masked(call, group, mask, query.size(0))
    call = replace(call, causal=causal)
    if call.options.cp_comm_type == "p2p":
        reason = _reason_against_a_ring(call, query.size(0) * group.size(), key, value, mask)
        if reason is None:
            return ring_attention(query, key, value, scale=call.scale, causal=causal, group=group).flatten(2)
        _report_no_ring(reason)
    return _all_gather(call, group, query, key, value, mask)


def _causal_or_masked(
    call: CoreAttentionCall, group: dist.ProcessGroup, mask: Tensor | None, tokens: int
) -> tuple[bool, Tensor | None]:
    """Return whether queries see no later key, and the mask, if it says more than that."""
    if call.options.window_alone:
        return False, None
    if mask is not None and rows_are_causal(mask, chunk_starts(tokens, group)):
        return True, None
    return call.causal and mask is None, mask


def _reason_against_a_ring(
    call: CoreAttentionCall, tokens: int, key: Tensor, value: Tensor, mask: Tensor | None
) -> str | None:
    """Return what the ring does not compute, of a sequence of ``tokens``."""
    if mask is not None:
        return "the mask of the data loader"
    if any(limit is not None and limit < tokens - 1 for limit in call.options.window):
        return "a window"
    if call.dropout_p:
        return "attention dropout"
    return "keys and values of different head sizes" if key.size(3) != value.size(3) else None


def _report_no_ring(reason: str) -> None:
    does = "gathers keys and values, as all_gather does"
    report_fallback("--cp-comm-type p2p", reason, does, "Give --cp-comm-type all_gather")


def _all_gather(
    call: CoreAttentionCall,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Attend to everyone's keys; a causal chunk to those up to its own end, without a mask."""
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
    """Compute a part of the heads over the whole sequence."""
    if mask is not None and not call.options.window_alone:
        mask = cache_on_tensor(mask, "whole", partial(_whole_mask, mask, group))
    query, key, value = (to_sequence_order(a2a_gather_sequence(t, group)) for t in (query, key, value))
    output = call.attend(query, key, value, **visible(call, mask, query.size(1)))
    heads = output.unflatten(2, (query.size(2), -1))
    return a2a_gather_heads(to_rank_order(heads, group.size()), group).flatten(2)


def _whole_mask(mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[b, 1, s / cp, s]`` of each rank's queries to ``[b, 1, s, s]``."""
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
    """Return attention of packed sequences, each of which is cut over the ranks, ``[t / cp, n * d]``.

    There is no ring of packed sequences: under p2p their keys and values are gathered, which is reported.

    Args:
        call: how the layer attends, and how its ranks share keys and values.
        group: the ranks that share each sequence.
        query, key, value: ``[t / cp, n or g, d]``: of each sequence its chunks r and 2·cp - 1 - r.
        packed_seq_params: with the boundaries of the whole sequences, ``[sequences + 1]``.

    Raises:
        UsageError: a sequence is not a multiple of 2·cp long, or has a window and looks ahead.
    """
    sharding = sharding_of_batch(packed_seq_params, key.size(0), call.causal, group, key.device)
    if call.options.cp_comm_type == "a2a":
        tokens = sharding.sequence_order.numel()
        packed = packed_sequences(packed_seq_params, tokens, tokens)
        parts = (a2a_gather_sequence(t, group).flatten(0, 1) for t in (query, key, value))
        query, key, value = (t.index_select(0, sharding.sequence_order) for t in parts)
        output = call.attend_packed(query, key, value, packed).unflatten(1, (query.size(1), -1))
        by_rank = output.index_select(0, sharding.rank_order).unflatten(0, (group.size(), -1))
        return a2a_gather_heads(by_rank, group).flatten(1)
    if call.options.cp_comm_type == "p2p":
        _report_no_ring("packed sequences")
    if call.options.window != (None, None) and not call.causal:
        raise UsageError(
            "packed sequences, a window and no causal mask under --cp-comm-type all_gather",
            "two of the three",
            "Use --cp-comm-type a2a.",
        )
    parts = (all_gather(t, group).flatten(0, 1) for t in (key, value))
    key, value = (t.index_select(0, sharding.visible_keys) for t in parts)
    return call.attend_packed(query, key, value, sharding.packed)


def sharding_of_batch(
    packed_seq_params: Any, tokens: int, causal: bool, group: dist.ProcessGroup, device: torch.device
) -> PackedSharding:
    """Return how the batch is cut, worked out once: every layer is handed the same parameters.

    Args:
        packed_seq_params: upstream's PackedSeqParams; the key's boundaries are read.
        tokens: of this rank.
        causal: no query sees a later key.
        group: the ranks that share each sequence.
        device: where the indices are wanted.
    """
    recipe = (tokens, causal, group.size(), group.rank())

    def read() -> PackedSharding:
        actual = packed_seq_params.cu_seqlens_kv.flatten().tolist()
        padded = packed_seq_params.cu_seqlens_kv_padded
        starts = actual if padded is None else padded.flatten().tolist()
        return packed_sharding(starts, actual, *recipe, device)

    return cache_on_object(packed_seq_params, "sharding", cu_seqlens(packed_seq_params), read, recipe)
