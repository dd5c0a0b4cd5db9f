"""Compute attention in plain torch as the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd
from megatron_npu.ops.attention.spec import AttentionSpec, forbidden_pairs
from megatron_npu.ops.dispatch import Operation


def unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return ``softmax(q·kᵀ·scale + mask)·v`` as a contiguous tensor.

    Memory grows with queries × keys of a segment.

    Args:
        query, key, value: tensors in the layout of ``spec`` with any float dtype. Scores and softmax are fp32
            (fp64 stays fp64).
        spec: the call.
        mask: broadcastable to ``[b, n, sq, sk]``, four dimensions, True where masked; None means no mask.
        sink: ``[n]``, one extra score per head, without a value; None means no sink.
    """
    query = to_bnsd(query, spec.layout, spec.heads)
    key, value = (
        to_bnsd(t, spec.layout, spec.key_heads).repeat_interleave(spec.heads // spec.key_heads, dim=1)
        for t in (key, value)
    )
    outputs = []
    for s in spec.segments:
        rows, columns = slice(s.q0, s.q1), slice(s.k0, s.k1)
        forbidden = forbidden_pairs(s, query.device)
        if mask is not None:
            forbidden = mask if forbidden is None else mask | forbidden
        weights = _softmax(query[:, :, rows], key[:, :, columns], spec.scale, forbidden, sink)
        outputs.append(F.dropout(weights.to(query.dtype), spec.dropout_p) @ value[:, :, columns])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return from_bnsd(output, spec.layout).contiguous()


def _softmax(
    query: Tensor, key: Tensor, scale: float, forbidden: Tensor | None, sink: Tensor | None
) -> Tensor:
    """Return the attention weights ``[b, n, sq, sk]`` for queries and keys ``[b, n, s, d]``.

    Fully masked rows are zero.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(precise) * scale
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, float("-inf"))
    if sink is not None:
        column = sink.to(precise).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    if forbidden is None:
        return scores.softmax(-1)
    fully_masked = forbidden.expand_as(scores).all(-1, keepdim=True)
    # softmax of nothing but -inf is nan, in its gradient too: give such rows zeros instead
    return scores.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)


operation = Operation("attention", unfused, draws=lambda q, k, v, spec, mask: spec.dropout_p > 0.0)
