"""Attention on the CPU: torch's flash kernel where it applies, else tile by tile."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.attention.blockwise import blockwise
from megatron_npu.ops.attention.layouts import bnsd_shape, from_bnsd, to_bnsd
from megatron_npu.ops.attention.reference import operation
from megatron_npu.ops.attention.spec import Case


@operation.on("cpu")
def attend(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """Attention of ``case``; no more pairs are stored than the caller's own mask has."""
    if not torch_has_a_kernel(query, value, case):
        return blockwise(query, key, value, case)
    segment = case.segments[0]
    query = to_bnsd(query, case.layout, case.heads)
    key, value = (to_bnsd(t, case.layout, case.key_heads) for t in (key, value))
    if query.size(2) == 1 and case.mask is None:  # decoding: one query sees one run of keys
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


def torch_has_a_kernel(query: Tensor, value: Tensor, case: Case) -> bool:
    """Whether torch's flash kernel takes the call: plain, causal from the top left, one query, or a mask.

    With dropout, with head sizes that differ, or with a mask for what diagonals say, it would build all the
    scores or an ``[sq, sk]`` mask. Where both can, it is the faster one (benchmarks/results/attention.json).
    """
    sizes = bnsd_shape(query, case.layout, case.heads)[3], bnsd_shape(value, case.layout, case.key_heads)[3]
    if case.packed or case.dropout_p or sizes[0] != sizes[1]:
        return False
    segment = case.segments[0]
    if segment.low is None and segment.high is None:
        return True
    if case.mask is not None or segment.has_blind_queries():
        return False
    one_query = segment.q1 - segment.q0 == 1
    return one_query or (segment.low is None and segment.high == 0)
