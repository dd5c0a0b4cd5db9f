"""Attention written out in plain torch: what every device must agree with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd
from megatron_npu.ops.attention.spec import Case, Segment, forbidden_pairs
from megatron_npu.ops.dispatch import Operation


def unfused(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """Scores and softmax in fp32 (fp64 stays fp64); memory grows with queries × keys of a document."""
    query = to_bnsd(query, case.layout, case.heads)
    key, value = (
        to_bnsd(t, case.layout, case.key_heads).repeat_interleave(case.heads // case.key_heads, dim=1)
        for t in (key, value)
    )
    outputs = [
        _segment(query[:, :, s.q0 : s.q1], key[:, :, s.k0 : s.k1], value[:, :, s.k0 : s.k1], s, case)
        for s in case.segments
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return from_bnsd(output, case.layout).contiguous()


def _segment(query: Tensor, key: Tensor, value: Tensor, segment: Segment, case: Case) -> Tensor:
    """``[b, n, s, d]`` throughout."""
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(precise) * case.scale
    forbidden = forbidden_pairs(segment, query.device)
    if case.mask is not None:
        forbidden = case.mask if forbidden is None else case.mask | forbidden
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, float("-inf"))
        blind = forbidden.expand_as(scores).all(-1, keepdim=True)
        # softmax of nothing but -inf is nan, in its gradient too: give such rows zeros instead
        scores = scores.masked_fill(blind, 0.0)
    weights = scores.softmax(-1)
    if forbidden is not None:
        weights = weights.masked_fill(blind, 0.0)
    return F.dropout(weights.to(query.dtype), case.dropout_p) @ value


operation = Operation("attention", unfused, draws=lambda q, k, v, case: case.dropout_p > 0.0)
