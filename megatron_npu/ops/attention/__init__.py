"""Compute attention, ``softmax(q·kᵀ·scale + mask)·v``, with one definition for all tensor layouts and masks.

``spec`` describes a call, ``checks`` rejects contradictory arguments, and ``reference`` is the reference
implementation; ``cpu``, ``cuda`` and ``npu`` implement attention on each device, and ``blockwise`` implements
it on the CPU where torch has no kernel. ``block`` is attention over part of the keys, one step of the ring in
``context_parallel``. docs/reference/attention.md describes the kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu.ops.attention import checks, cpu, cuda, npu  # noqa: F401  (devices register themselves)
from megatron_npu.ops.attention.layouts import bnsd_shape, from_tokens, to_tokens
from megatron_npu.ops.attention.reference import operation, unfused
from megatron_npu.ops.attention.sink import operation as operation_with_sink
from megatron_npu.ops.attention.spec import (
    AttentionSpec,
    Offset,
    PackedSequences,
    Window,
    dense_segments,
    packed_segments,
)
from megatron_npu.options.attention_flags import DEFAULTS, AttentionFlags

__all__ = ["Offset", "PackedSequences", "Window", "attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    scale: float,
    num_heads: int | None = None,
    causal: bool = False,
    window: Window = (None, None),
    offset: Offset = 0,
    mask: Tensor | None = None,
    packed: PackedSequences | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    flags: AttentionFlags = DEFAULTS,
) -> Tensor:
    """Return the attention of ``query`` over ``key`` and ``value`` as a contiguous tensor in the layout of
    ``query``.

    Query i is at position ``offset + i``; it sees key j unless one of these forbids it: ``causal`` (j >
    position), ``window`` (j < position - window_left or j > position + window_right), ``mask`` (True at [i,
    j]), ``packed`` (another sequence). With ``packed``, i, j and the offset are counted from the start of the
    sequence.

    Args:
        query: ``[s, b, h]`` (SBH), ``[b, s, h]`` (BSH), ``[s, b, n, d]`` (SBND), ``[b, s, n, d]`` (BSND),
            ``[b, n, s, d]`` (BNSD) or ``[t, n, d]`` (TND); fp32, bf16 or fp16.
        key: same layout and dtype; its number of heads must divide the query's (grouped-query attention).
        value: like ``key``; its head size may differ, and determines that of the result.
        layout: one of the names above.
        scale: factor applied to the scores, usually 1 / sqrt(d).
        num_heads: number of query heads; required for SBH and BSH, whose last dimension is n * d.
        causal: hide the keys after the query's own position.
        window: (window_left, window_right), the tokens that a query sees back and ahead; None means no limit.
        offset: position of the first query among the keys (keys in a cache, context parallelism); "end": the
            last query is aligned with the last key (causal "bottom-right").
        mask: boolean, broadcastable to ``[b, n, sq, sk]``; True means masked (Megatron's convention).
        packed: lengths of the sequences; required for TND. In the other layouts tokens are counted row by row
            of the batch, and no sequence extends beyond its row.
        dropout_p: probability of dropping an attention weight, in [0, 1). Uses the device's generator: the
            same generator state drops the same weights.
        sink: ``[n]``, one extra score per query head, which takes a share of the weights and has no value;
            zeros give softmax-off-by-one. Any float dtype. None means no sink.
        flags: the run's flags, passed to the device's plan as ``spec.flags``; window and layout of this call
            are the arguments above.

    Raises:
        ValueError: the arguments contradict each other or the tensors' shapes.

    Softmax is computed in fp32. A query that sees no key gets zeros and zero gradients. Masked keys and
    values must still be finite: NaN or infinity there is multiplied by a weight of 0 and may reach the
    result, as in torch's ``scaled_dot_product_attention``. On a CPU ``dropout_p`` is rounded to a multiple of
    2^-16, and to at least 2^-16 if it is not 0. Source: Vaswani et al. 2017; mask semantics of Megatron-LM
    and of torch_npu's ``npu_fusion_attention``.
    """
    heads, key_heads = checks.head_counts(query, key, layout, num_heads)
    checks.check_tensors(query, key, value, layout, heads, key_heads)
    checks.check_limits(window, mask, dropout_p)
    checks.check_packed(packed, layout, mask)
    checks.check_sink(sink, heads)
    if packed is not None and layout != "TND":
        tokens = (to_tokens(query, layout, heads), *(to_tokens(t, layout, key_heads) for t in (key, value)))
        asked: dict[str, Any] = {"causal": causal, "window": window, "offset": offset, "packed": packed}
        asked |= {"dropout_p": dropout_p, "sink": sink, "flags": flags}
        output = attention(*tokens, layout="TND", scale=scale, **asked)
        return from_tokens(output, layout, bnsd_shape(query.shape, layout, heads)[0]).contiguous()
    queries = bnsd_shape(query.shape, layout, heads)[2]
    keys = bnsd_shape(key.shape, layout, key_heads)[2]
    if packed is not None:
        checks.check_lengths(packed, queries, keys)
        # lists of lengths are as good, but not hashable
        packed = PackedSequences(tuple(packed.query_lengths), tuple(packed.key_lengths))
        segments = packed_segments(packed, causal, window, offset)
    else:
        segments = dense_segments(queries, keys, causal, window, offset)
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    spec = AttentionSpec(
        layout,
        heads,
        key_heads,
        float(scale),
        segments,
        packed is not None,
        mask is not None,
        dropout_p,
        flags,
    )
    if query.numel() == 0 or value.numel() == 0:
        # nothing to compute, and kernels need not take it
        return unfused(query, key, value, spec, mask, sink)
    if sink is not None:
        return operation_with_sink(query, key, value, sink, spec, mask)
    return operation(query, key, value, spec, mask)
