"""Attention on the CPU: torch's flash kernel where it applies, else tile by tile."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.attention.blockwise import blockwise
from megatron_npu.ops.attention.case import Case
from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd
from megatron_npu.ops.attention.reference import operation


@operation.on("cpu")
def attend(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """Attention of ``case``; its memory grows with the sequence, never with its square."""
    if not torch_has_a_kernel(case, query.size(-1) == value.size(-1)):
        return blockwise(query, key, value, case)
    segment = case.segments[0]
    query, key, value = (
        to_bnsd(t, case.layout, n)
        for t, n in ((query, case.heads), (key, case.key_heads), (value, case.key_heads))
    )
    if (
        query.size(2) == 1 and case.mask is None
    ):  # decoding: one query sees one run of keys, and no mask is needed
        first, last = segment.keys_of(0, 1)
        key, value = key[:, :, first:last], value[:, :, first:last]
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if case.mask is None else ~case.mask,
        is_causal=query.size(2) > 1 and segment.high == 0,
        scale=case.scale,
        enable_gqa=case.heads != case.key_heads,
    )
    return from_bnsd(output, case.layout).contiguous()


def torch_has_a_kernel(case: Case, same_head_size: bool) -> bool:
    """Whether torch's flash kernel takes the call: plain, causal from the top left, one query, or a mask.

    With dropout, with head sizes that differ, or with a mask for what diagonals say, it would build all the
    scores or an ``[sq, sk]`` mask. Where both can, it is the faster one (benchmarks/results/attention.json).
    """
    if case.packed or case.dropout_p or not same_head_size:
        return False
    segment = case.segments[0]
    if segment.low is None and segment.high is None:
        return True
    if case.mask is not None or segment.has_blind_queries():
        return False
    one_query = segment.q1 - segment.q0 == 1
    return one_query or (segment.low is None and segment.high == 0)
