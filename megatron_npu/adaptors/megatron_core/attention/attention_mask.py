"""Translate megatron-core's mask arguments into arguments of ``ops.attention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.attention.call import CoreAttentionCall
from megatron_npu.ops.attention import PackedSequences
from megatron_npu.ops.attention.packed_mask import sequence_lengths
from megatron_npu.ops.caching import cache_on_object, cache_on_tensor


def visible(call: CoreAttentionCall, mask: Tensor | None, batch: int) -> dict[str, Any]:
    """Return the arguments of ``ops.attention`` that define which keys are visible, except for the window.

    Upstream uses only ``config.window_size`` if it is set, otherwise only the mask, otherwise the causal
    triangle. The last query is aligned with the last key, which matters only if there are more keys than
    queries (a cache).
    """
    if call.options.window_alone:
        return {"offset": "end"}
    if mask is None:
        return {"causal": call.causal, "offset": "end"}
    lengths = sequence_lengths(mask)
    if lengths is None:
        return {"mask": mask, "offset": "end"}
    lengths *= batch // mask.size(0)
    if len(lengths) == batch:
        return {"causal": True}
    return {"causal": True, "packed": PackedSequences(lengths, lengths)}


def rows_are_causal(mask: Tensor, starts: Sequence[int]) -> bool:
    """Return True if a mask ``[b, 1, q, s]`` hides exactly the future keys.

    Args:
        mask: a boolean mask, True where masked; its values are read once, and the result is cached on the
            tensor.
        starts: the positions in the sequence at which the equally long parts of the rows begin.
    """

    def read() -> bool:
        keys = torch.arange(mask.size(-1), device=mask.device)
        length = mask.size(-2) // len(starts)
        rows = torch.cat([keys[start : start + length] for start in starts])
        return torch.equal(mask, (keys > rows[:, None]).expand_as(mask))

    return cache_on_tensor(mask, "causal", read, tuple(starts))


def packed_sequences(packed_seq_params: Any, queries: int, keys: int) -> PackedSequences:
    """Return the lengths of packed sequences in host memory.

    The lengths are read once per batch, and all layers share them.

    Padding between sequences, and after the last one, counts as a sequence of its own: it sees only itself,
    and its output is never used.

    Args:
        packed_seq_params: upstream's PackedSeqParams, whose boundaries are ``[sequences + 1]``.
        queries, keys: the numbers of tokens, including padding.
    """

    def read() -> PackedSequences:
        query = _lengths(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded, queries)
        key = _lengths(packed_seq_params.cu_seqlens_kv, packed_seq_params.cu_seqlens_kv_padded, keys)
        return PackedSequences(
            *zip(*(pair for pair in zip(query, key, strict=True) if any(pair)), strict=True)
        )

    sources = cu_seqlens(packed_seq_params)
    return cache_on_object(packed_seq_params, "packed_sequences", sources, read, (queries, keys))


def cu_seqlens(packed_seq_params: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors with the sequence boundaries, from which cached values are computed."""
    return (
        packed_seq_params.cu_seqlens_q,
        packed_seq_params.cu_seqlens_kv,
        packed_seq_params.cu_seqlens_q_padded,
        packed_seq_params.cu_seqlens_kv_padded,
    )


def _lengths(ends: Tensor, padded_ends: Tensor | None, tokens: int) -> list[int]:
    """Return the length of each sequence, and the length of the padding that follows it."""
    bounds = ends.tolist()
    starts = bounds if padded_ends is None else padded_ends.tolist()
    lengths = []
    for i in range(len(bounds) - 1):
        length = bounds[i + 1] - bounds[i]
        lengths += [length, starts[i + 1] - starts[i] - length]
    return [*lengths, tokens - starts[-1]]
