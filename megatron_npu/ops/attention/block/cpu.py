"""Compute attention over one block of keys on the CPU, with torch's flash kernel or, for dropout, in
tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.block.heads import heads_first, heads_third, regroup, ungroup
from megatron_npu.ops.attention.block.reference import (
    Drawn,
    Gradients,
    Residuals,
    attention_block,
    attention_block_backward,
    unfused,
    unfused_backward,
)
from megatron_npu.ops.attention.block.tiles import row_tiles
from megatron_npu.ops.attention.spec import AttentionSpec, Segment, forbidden_pairs
from megatron_npu.ops.caching import lru_cache_tensors


@attention_block.on("cpu")
def forward(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Drawn]:
    """Compute attention over one block of keys; see ``reference.unfused``."""
    if spec.dropout_p:
        return unfused(query, key, value, spec)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, key, value = ungroup(query, key, value)
    outputs, lses = [], []
    for call in _calls(spec):
        rows, columns = slice(call.q0, call.q1), slice(call.k0, call.k1)
        tensors = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        causal, mask = _visible(call, query.dtype)
        output, lse = kernel(*tensors, 0.0, causal, attn_mask=mask, scale=spec.scale)
        outputs.append(output)
        lses.append(lse)
    joined, lse = (outputs[0], lses[0]) if len(outputs) == 1 else (torch.cat(outputs, 2), torch.cat(lses, 2))
    return heads_third(joined).contiguous(), lse, ()


@attention_block_backward.on("cpu")
def backward(grad: Tensor, residuals: Residuals, spec: AttentionSpec, drawn: Drawn) -> Gradients:
    """Compute the gradients of attention over one block of keys; see ``reference.unfused_backward``."""
    if spec.dropout_p:
        return unfused_backward(grad, residuals, spec, drawn)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, key, value = ungroup(*residuals[:3])
    grad, output, lse = heads_first(grad), heads_first(residuals.output), residuals.lse
    calls = list(_calls(spec))
    totals: Gradients | None = None
    for call in calls:
        rows, columns = slice(call.q0, call.q1), slice(call.k0, call.k1)
        parts = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        results = output[:, :, rows], lse[:, :, rows].contiguous()
        causal, mask = _visible(call, query.dtype)
        grads = kernel(grad[:, :, rows], *parts, *results, 0.0, causal, attn_mask=mask, scale=spec.scale)
        if len(calls) == 1:
            return regroup(grads, residuals.key.size(2), residuals.key.dtype)
        totals = totals or (torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value))
        for total, place, part in zip(totals, (rows, columns, columns), grads, strict=True):
            total[:, :, place] += part
    assert totals is not None
    return regroup(totals, residuals.key.size(2), residuals.key.dtype)


def _calls(spec: AttentionSpec) -> list[Segment]:
    """Return the arguments of the calls to torch's flash kernel.

    There is one call per segment, or with a window one per run of queries.
    """
    calls: list[Segment] = []
    for segment in spec.segments:
        calls += [segment] if segment.is_plain else row_tiles(segment)
    return calls


def _visible(call: Segment, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    """Return whether a kernel call is causal, and the mask tensor to add to its scores."""
    if call.is_plain:
        return call.window_right == 0, None
    return False, _added(call._replace(q0=0, q1=call.q1 - call.q0, k0=0, k1=call.k1 - call.k0), dtype)


@lru_cache_tensors(maxsize=16)  # the tiles of a band look alike
def _added(call: Segment, dtype: torch.dtype) -> Tensor:
    forbidden = forbidden_pairs(call, torch.device("cpu"))
    added = torch.zeros(call.q1, call.k1, dtype=dtype, device="cpu")
    return added if forbidden is None else added.masked_fill_(forbidden, float("-inf"))
