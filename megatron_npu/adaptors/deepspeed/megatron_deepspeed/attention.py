"""Patch ``ParallelAttention`` of ``megatron.model.transformer``, and the softmax that it uses with ALiBi."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, cat

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import around, records, replace
from megatron_npu.adaptors.shared.arguments import connect_attention_flags
from megatron_npu.adaptors.shared.core_attention import attend, more_is_masked_than_the_future, scale_of
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import softmax
from megatron_npu.ops.rotary import rotary_by_tables
from megatron_npu.options.attention_flags import AttentionFlags

Cache = tuple[Tensor, Tensor]  # keys and values [sk, b, n, d], before rotary embedding

connect_attention_flags(records)


@around(
    "megatron.model.transformer:ParallelAttention.forward",
    why="upstream materializes the scores [b, n, sq, sk], but the device has fused attention; alibi adds a "
    "bias to the scores and keeps upstream's code",
)
def forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    layer_past: Cache | None = None,
    get_key_value: bool = False,
    encoder_output: Tensor | None = None,
    alibi: Tensor | None = None,
) -> tuple[Any, Tensor]:
    """Compute the attention layer: map ``[sq, b, h]`` to ``[sq, b, h]`` and return it with a bias ``[h]``.

    With ``get_key_value``, the key-value cache is returned too.

    Raises:
        UsageError: a window is requested together with alibi.
    """
    from megatron import get_args

    flags = AttentionFlags.from_args(get_args())
    if alibi is not None:
        _refuse_window(flags)
        cached = {"layer_past": layer_past, "get_key_value": get_key_value}
        return original(
            self, hidden_states, attention_mask, encoder_output=encoder_output, alibi=alibi, **cached
        )
    crossing = self.attention_type.name == "cross_attn"
    causal = self.attn_mask_type.name == "causal"
    query, key, value = _project(self, hidden_states, encoder_output if crossing else None)
    key, value = _behind_cache(layer_past, key, value)
    present = key, value
    first = 0 if crossing else key.size(0) - query.size(0)  # cached keys lie before the queries' own
    if self.position_embedding_type.name == "rotary":
        query, key = _turn(self, query, key, value)
    dropout_p = self.attention_dropout.p if self.training else 0.0
    with _masks_of_this_rank(dropout_p):
        context = attend(
            query,
            key,
            value,
            flags=flags.without_window() if crossing else flags,
            scale=scale_of(self),
            causal=causal,
            offset=first,
            mask=_mask_of(attention_mask, first, query, key)
            if not causal or more_is_masked_than_the_future()
            else None,
            dropout_p=dropout_p,
        )
    output, bias = self.dense(context.flatten(2))
    return ([output, present] if get_key_value else output), bias


def _masks_of_this_rank(dropout_p: float) -> AbstractContextManager[Any]:
    """Return a context in which each rank draws its own dropout masks for attention.

    Attention heads are split over the ranks.
    """
    from megatron import mpu

    return mpu.get_cuda_rng_tracker().fork() if dropout_p else contextlib.nullcontext()  # type: ignore[no-any-return]


def _refuse_window(flags: AttentionFlags) -> None:
    if flags.window != (None, None):
        raise UsageError(
            "--pre-tockens and --next-tockens cannot be used with --position-embedding-type alibi, because "
            "upstream's own code computes attention with alibi and does not support windows. Remove the "
            "window flags, or use another position embedding."
        )


def _behind_cache(past: Cache | None, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend the cached keys and values to the new keys and values, and return both."""
    if past is None:
        return key, value
    return cat([past[0].type_as(key), key]), cat([past[1].type_as(value), value])


def _mask_of(mask: Tensor | None, first: int, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the part ``[.., sq, sk]`` of an attention mask that belongs to the given tokens.

    A curriculum may have shortened the sequence.
    """
    return None if mask is None else mask[..., first : first + query.size(0), : key.size(0)]


def _project(self: Any, hidden: Tensor, encoded: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Project the hidden states to query, key and value, each ``[s, b, n, d]``.

    For cross-attention, key and value come from ``encoded``.
    """
    heads, size = self.num_attention_heads_per_partition, self.hidden_size_per_attention_head
    if encoded is None:
        mixed, _ = self.query_key_value(hidden)
        query, key, value = mixed.unflatten(-1, (heads, 3 * size)).chunk(3, -1)
        return query, key, value
    query = self.query(hidden)[0].unflatten(-1, (heads, size))
    key, value = self.key_value(encoded)[0].unflatten(-1, (heads, 2 * size)).chunk(2, -1)
    return query, key, value


def _turn(self: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary embedding to query and key, according to their positions.

    Upstream fails with a cache, because it calls numel on a tuple.
    """
    keys, behind = key.size(0), key.size(0) - query.size(0)
    cosine, sine = (table[:, None] for table in self.rotary_emb(value, seq_len=keys))
    return (
        rotary_by_tables(query, cosine[behind:], sine[behind:]),
        rotary_by_tables(key, cosine, sine),
    )


@replace(
    "megatron.model.fused_softmax:FusedScaleMaskSoftmax.forward",
    why="upstream's kernels are CUDA extensions, and both its paths fail an assertion if a causal layer has "
    "a mask, as without --deepspeed",
)
def forward_softmax(self: Any, input: Tensor, mask: Tensor | None) -> Tensor:
    """Convert attention scores ``[b, n, sq, sk]`` to probabilities of the same shape and dtype.

    A causal mask that hides more than later keys (``--reset-attention-mask``) is applied. With cached keys,
    only the mask determines which keys a query attends to.
    """
    causal = self.attn_mask_type.name == "causal" and input.size(-2) == input.size(-1)
    return softmax.scale_mask_softmax(input, mask, self.scale, causal)
