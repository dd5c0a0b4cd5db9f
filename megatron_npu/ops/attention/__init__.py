"""Attention: softmax(q·kᵀ·scale + mask)·v, with the same meaning for every layout and mask.

``spec`` says what a call asks for, ``checks`` refuses contradictions, ``reference`` is the formula; ``cpu``,
``cuda`` and ``npu`` compute it, the cpu with ``blockwise`` where torch has no kernel. ``block`` is attention
over some of the keys, a step of the ring in ``context_parallel``. Kernels: docs/reference/attention.md.
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
    """Return the attention of ``query`` over ``key`` and ``value``, contiguous, in the layout of ``query``.

    Query i stands at position ``offset + i``; it sees key j unless one of these forbids it:
    ``causal`` (j > position), ``window`` (j < position - window_left or j > position + window_right),
    ``mask`` (True at [i, j]), ``packed`` (another sequence). With ``packed``, i, j and the offset are counted
    from the start of the sequence.

    Args:
        query: ``[s, b, h]`` (SBH), ``[b, s, h]`` (BSH), ``[s, b, n, d]`` (SBND), ``[b, s, n, d]`` (BSND),
            ``[b, n, s, d]`` (BNSD) or ``[t, n, d]`` (TND); fp32, bf16 or fp16.
        key: the same layout and dtype; its number of heads divides the query's (grouped-query attention).
        value: like ``key``; its head size may differ, the result then has it.
        layout: one of the names above.
        scale: factor of the scores, usually 1 / sqrt(d).
        num_heads: heads of the query; required for SBH and BSH, whose last dimension is n * d.
        causal: no key after the query's own position.
        window: (window_left, window_right), how far a query sees back and ahead, in tokens; None does not
            limit.
        offset: position of the first query among the keys (keys in a cache, context parallelism); "end":
            the last query stands at the last key (causal "bottom-right").
        mask: boolean, broadcastable to ``[b, n, sq, sk]``; True means masked (Megatron's convention).
        packed: lengths of the sequences; required for TND. In the other layouts the tokens count batch by
            batch, and a sequence ends with its row or before.
        dropout_p: probability that an attention weight is dropped, in [0, 1), drawn from the device's
            generator: with the same generator state the same weights are dropped.
        sink: ``[n]``, for each head of the query one more score, which takes its share of the weights and has
            no value; zeros make a softmax off by one. Any float dtype. None: there is none.
        flags: of the run, which reach the plan of a device as ``spec.flags``; the call's window and layout
            are those above.

    Raises:
        ValueError: the arguments contradict each other or the shapes; the message says which.

    Softmax is computed in fp32. A query that sees no key gets zeros, and gives zero gradients. What is masked
    must be numbers all the same: NaN or infinity in a masked key or value is multiplied by a weight of 0, and
    may reach the result, as in torch's ``scaled_dot_product_attention``. On a CPU ``dropout_p`` is a multiple
    of 2^-16: the next one, and 2^-16 at least if it is not 0. Source:
    Vaswani et al. 2017; mask semantics of Megatron-LM and of torch_npu's ``npu_fusion_attention``.
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
