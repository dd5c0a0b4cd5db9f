"""What a query sees, as megatron-core says it, in the words of ``ops.attention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_npu import attention_flags
from megatron_npu.ops.attention import PackedSequences, Window
from megatron_npu.ops.attention.packed_mask import sequence_lengths
from megatron_npu.ops.caching import cache_on_object, cache_on_tensor


def window_of(module: Any) -> Window:
    """Return how far a query sees: ``--pre-tockens/--next-tockens`` if given, else ``config.window_size``."""
    if _flags_hold(module):
        return attention_flags.CURRENT.pre_tokens, attention_flags.CURRENT.next_tokens
    size = _configured_window(module)
    if size is None:
        return None, None
    pre, after = (None if limit < 0 else limit for limit in size)  # -1 is TransformerEngine's "no limit"
    return pre, after


def _flags_hold(module: Any) -> bool:
    """Return whether the flags say what this layer's queries see: positions in two sequences are not near."""
    limits = attention_flags.CURRENT.pre_tokens, attention_flags.CURRENT.next_tokens
    return limits != (None, None) and module.attention_type != "cross"


def _configured_window(module: Any) -> tuple[int, int] | None:
    """Return ``config.window_size`` where this layer has it (``window_attn_skip_freq``, since 0.15)."""
    return vars(module.scale_mask_softmax).get("window_size", module.config.window_size)


def visible(module: Any, mask: Tensor | None, causal: bool, batch: int) -> dict[str, Any]:
    """Return the arguments of ``ops.attention`` that say what a query sees, as upstream decides it.

    Upstream takes ``config.window_size`` alone, else the mask alone, else the causal triangle. The last query
    stands at the last key, which matters only where there are more keys (a cache).
    """
    if window_is_all(module):
        return {"offset": "end"}
    if mask is None:
        return {"causal": causal, "offset": "end"}
    lengths = sequence_lengths(mask)
    if lengths is None:
        return {"mask": mask, "offset": "end"}
    lengths *= batch // mask.size(0)
    if len(lengths) == batch:
        return {"causal": True}
    return {"causal": True, "packed": PackedSequences(lengths, lengths)}


def window_is_all(module: Any) -> bool:
    """Return whether ``config.window_size`` alone says what a query sees, as upstream has it."""
    return _configured_window(module) is not None and not _flags_hold(module)


def rows_are_causal(mask: Tensor, starts: Sequence[int]) -> bool:
    """Return whether a mask ``[b, 1, q, s]`` says no more than that no query sees a later key.

    Args:
        mask: boolean, True where masked; its values are read once, the answer is kept with the tensor.
        starts: where in the sequence the parts of the rows begin, which are equally long.
    """

    def read() -> bool:
        keys = torch.arange(mask.size(-1), device=mask.device)
        length = mask.size(-2) // len(starts)
        rows = torch.cat([keys[start : start + length] for start in starts])
        return torch.equal(mask, (keys > rows[:, None]).expand_as(mask))

    return cache_on_tensor(mask, "causal", read, tuple(starts))


def documents(packed_seq_params: Any, queries: int, keys: int) -> PackedSequences:
    """Return the lengths on the host, found once per batch: every layer is handed the same object.

    Padding between documents, and behind the last one, is a document of its own: it sees itself only, and
    nobody reads what becomes of it.
    """

    def read() -> PackedSequences:
        query = _lengths(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded, queries)
        key = _lengths(packed_seq_params.cu_seqlens_kv, packed_seq_params.cu_seqlens_kv_padded, keys)
        return PackedSequences(
            *zip(*(pair for pair in zip(query, key, strict=True) if any(pair)), strict=True)
        )

    sources = boundaries(packed_seq_params)
    return cache_on_object(packed_seq_params, "documents", sources, read, (queries, keys))


def boundaries(packed_seq_params: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that say where documents begin and end."""
    return (
        packed_seq_params.cu_seqlens_q,
        packed_seq_params.cu_seqlens_kv,
        packed_seq_params.cu_seqlens_q_padded,
        packed_seq_params.cu_seqlens_kv_padded,
    )


def _lengths(ends: Tensor, padded_ends: Tensor | None, tokens: int) -> list[int]:
    """Return the lengths of document, padding, document, padding, … to the end of the tokens."""
    bounds = ends.tolist()
    starts = bounds if padded_ends is None else padded_ends.tolist()
    lengths = []
    for i in range(len(bounds) - 1):
        length = bounds[i + 1] - bounds[i]
        lengths += [length, starts[i + 1] - starts[i] - length]
    return [*lengths, tokens - starts[-1]]
