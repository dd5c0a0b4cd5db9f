"""Compute attention on the CPU: with torch's flash kernel if it supports the call and is faster,
otherwise in tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.attention.blockwise import blockwise, fused, multiplies_bf16
from megatron_npu.ops.attention.layouts import bnsd_shape, from_bnsd, to_bnsd
from megatron_npu.ops.attention.reference import operation
from megatron_npu.ops.attention.spec import AttentionSpec
from megatron_npu.ops.products.linear import faster_than_torch

_FEWEST_QUERIES = 32  # of a call that tiles are worth their start for


@operation.on("cpu")
def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Return the attention for ``spec`` without storing all query-key pairs, except in a mask that the
    caller passes.
    """
    if not torch_has_a_kernel(query, value, spec) or tiles_are_faster(query, spec):
        return blockwise(query, key, value, spec, mask)
    segment = spec.segments[0]
    query = to_bnsd(query, spec.layout, spec.heads)
    key, value = (to_bnsd(t, spec.layout, spec.key_heads) for t in (key, value))
    if query.size(2) == 1 and mask is None:  # decoding: one query sees one run of keys
        first, last = segment.visible_keys(0, 1)
        key, value = key[:, :, first:last], value[:, :, first:last]
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else ~mask,
        is_causal=query.size(2) > 1 and segment.window_right == 0,
        scale=spec.scale,
        enable_gqa=spec.heads != spec.key_heads,
    )
    return from_bnsd(output, spec.layout).contiguous()


def torch_has_a_kernel(query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    """Return True if torch's flash kernel supports the attention call.

    The kernel supports calls that are plain or causal, with one query, or with a mask.

    For calls with dropout, with different head sizes, or with a mask that expresses a window, torch would
    build all the scores or an ``[sq, sk]`` mask.
    """
    head_size = bnsd_shape(query.shape, spec.layout, spec.heads)[3]
    value_size = bnsd_shape(value.shape, spec.layout, spec.key_heads)[3]
    if spec.packed or spec.dropout_p or head_size != value_size:
        return False
    segment = spec.segments[0]
    if segment.sees_all_keys():
        return True
    if spec.masked or segment.has_fully_masked_rows():
        return False
    one_query = segment.q1 - segment.q0 == 1
    return one_query or (segment.window_left is None and segment.window_right == 0)


def tiles_are_faster(query: Tensor, spec: AttentionSpec) -> bool:
    """Return True if our tiled attention is faster than torch's kernel.

    Tiled attention is never faster for a small number of queries.

    For bf16, tiles are faster on processors that multiply it without AMX, where torch 2.13's kernel takes 1.9
    to 2.9 times as long, forward and backward (an EPYC with AVX512-BF16, 256 to 2,048 tokens); otherwise
    torch's kernel is faster (benchmarks/results/attention.json, from a Xeon with AMX). For fp32 without a
    mask, tiles are faster where our kernel exists and torch's kernel uses MKL on a non-Intel processor, which
    takes 1.0 to 2.0 times as long.
    """
    if bnsd_shape(query.shape, spec.layout, spec.heads)[2] < _FEWEST_QUERIES:
        return False
    if query.dtype is torch.bfloat16:
        return multiplies_bf16() and not torch.cpu._is_amx_tile_supported()
    return not spec.masked and faster_than_torch(query.dtype) and fused.takes(query, None)
