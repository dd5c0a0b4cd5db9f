"""Attention of a sequence that is cut over the ranks of a context-parallel group.

megatron-core cuts a sequence, or each document of packed ones, into 2·cp equal chunks and gives rank r the
chunks r and 2·cp - 1 - r, so that causal work is balanced. Keys and values go round in a ring
(``--cp-comm-type p2p``, the default), are gathered (``all_gather``), or sequences are exchanged for heads
(``a2a``; DeepSpeed-Ulysses, Jacobs et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.adaptors.megatron_core.attention.attention_mask import (
    boundaries,
    documents,
    rows_are_causal,
    visible,
    window_is_all,
)
from megatron_npu.errors import UsageError
from megatron_npu.ops.attention import Window
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
        report_fallback(
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
    group = group_of(module)
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
    group = group_of(module)
    chunk, starts = query.size(0) // 2, chunk_starts(query.size(0), group)
    causal, mask = _what_is_seen(module, mask, causal, group, query.size(0))
    key, value = (to_sequence_order(all_gather(t, group)) for t in (key, value))
    rows = (None, None) if mask is None else mask.chunk(2, dim=2)
    outputs = []
    for part, row, start in zip(query.chunk(2), rows, starts, strict=True):
        end = start + chunk if causal else key.size(0)
        outputs.append(attend(part, key[:end], value[:end], causal=causal, mask=row, offset=start))
    return torch.cat(outputs)


def _report_no_ring(reason: str) -> None:
    does = "gathers keys and values, as all_gather does"
    report_fallback("--cp-comm-type p2p", reason, does, "Give --cp-comm-type all_gather")


def _what_is_seen(
    module: Any, mask: Tensor | None, causal: bool, group: dist.ProcessGroup, tokens: int
) -> tuple[bool, Tensor | None]:
    """Return whether queries see no later key, and the mask, if it says more than that."""
    if window_is_all(module):
        return False, None
    if mask is not None and rows_are_causal(mask, chunk_starts(tokens, group)):
        return True, None
    return causal and mask is None, mask


def attend_with_own_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, attend: Attend
) -> Tensor:
    """As ``attend_to_gathered``; this rank computes a part of the heads, over the whole sequence."""
    group = group_of(module)
    if mask is not None and not window_is_all(module):
        mask = cache_on_tensor(mask, "whole", lambda: _whole_mask(mask, group))
    query, key, value = (to_sequence_order(a2a_gather_sequence(t, group)) for t in (query, key, value))
    output = attend(query, key, value, **visible(module, mask, causal, query.size(1)))
    heads = output.unflatten(2, (query.size(2), -1))
    return a2a_gather_heads(to_rank_order(heads, group.size()), group).flatten(2)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_seq_params: Any,
    causal: bool,
    limited: bool,
    communication: Communication,
    group: dist.ProcessGroup,
    attend: Attend,
) -> Tensor:
    """Attention of packed documents, each of which is cut over the ranks of ``group``.

    Args:
        query, key, value: ``[t / cp, n or g, d]``: of each document its chunks r and 2·cp - 1 - r.
        packed_seq_params: with the boundaries of the whole documents, ``[documents + 1]``.
        limited: whether there is a window.
        communication: a ring of documents is not here; their keys and values are gathered, which is reported.
        attend: ``ops.attention`` for TND with what the module decides, to ``[tq, n * d]``.

    Raises:
        UsageError: a document is not a multiple of 2·cp long, or has a window and looks ahead.
    """
    plan = plan_of_batch(packed_seq_params, key.size(0), causal, group, key.device)
    if communication == "exchange":
        whole = documents(packed_seq_params, *[plan.sequence_order.numel()] * 2)
        parts = (a2a_gather_sequence(t, group).flatten(0, 1) for t in (query, key, value))
        query, key, value = (t.index_select(0, plan.sequence_order) for t in parts)
        output = attend(query, key, value, packed=whole).unflatten(1, (query.size(1), -1))
        by_rank = output.index_select(0, plan.rank_order).unflatten(0, (group.size(), -1))
        return a2a_gather_heads(by_rank, group).flatten(1)
    if communication == "ring":
        _report_no_ring("packed sequences")
    if limited and not causal:
        raise UsageError(
            "packed sequences, a window and no causal mask under --cp-comm-type all_gather",
            "two of the three",
            "Use --cp-comm-type a2a.",
        )
    key, value = (all_gather(t, group).flatten(0, 1).index_select(0, plan.visible_keys) for t in (key, value))
    return attend(query, key, value, packed=plan.packed)


def plan_of_batch(
    packed_seq_params: Any, tokens: int, causal: bool, group: dist.ProcessGroup, device: torch.device
) -> PackedSharding:
    """Return the plan, made once per batch: every layer is handed the same parameters."""
    recipe = (tokens, causal, group.size(), group.rank())

    def read() -> PackedSharding:
        actual = packed_seq_params.cu_seqlens_kv.flatten().tolist()
        padded = packed_seq_params.cu_seqlens_kv_padded
        starts = actual if padded is None else padded.flatten().tolist()
        return packed_sharding(starts, actual, *recipe, device)

    return cache_on_object(packed_seq_params, "plan", boundaries(packed_seq_params), read, recipe)


def group_of(module: Any) -> dist.ProcessGroup:
    """Return the ranks that share the sequence: those of this layer (0.15 on), else of the whole run."""
    from megatron.core import parallel_state

    of_layer = getattr(getattr(module, "pg_collection", None), "cp", None)
    return of_layer or parallel_state.get_context_parallel_group()


def group_of_batch(module: Any, packed_seq_params: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share packed documents; None where this rank has them whole.

    A batch may name a group of its own, or say that one rank has it all (``PackedSeqParams``, since 0.16).
    """
    of_batch = getattr(packed_seq_params, "cp_group", None)
    if of_batch is None and getattr(packed_seq_params, "local_cp_size", None) is not None:
        return None
    group = of_batch or group_of(module)
    return group if group.size() > 1 else None


def _whole_mask(mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[b, 1, s / cp, s]`` of each rank's queries to ``[b, 1, s, s]``."""
    rows = mask.movedim(2, 0).to(torch.uint8)  # gloo has no bool
    return to_sequence_order(all_gather(rows, group)).movedim(0, 2).bool().contiguous()
