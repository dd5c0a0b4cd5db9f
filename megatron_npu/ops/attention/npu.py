"""Compute attention on the NPU with ``npu_fusion_attention``, after converting attention specs to its
arguments.

The checks are the limits that torch_npu's own documentation states for the operation (torch_npu 2.13.0,
``_op_plugin_docs.py``): a call outside them may be wrong without an error, so it is rejected beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.attention.layouts import bnsd_shape
from megatron_npu.ops.attention.reference import operation
from megatron_npu.ops.attention.spec import AttentionSpec, Segment, forbidden_pairs, window_from_end
from megatron_npu.ops.caching import cache_on_tensor, lru_cache_tensors
from megatron_npu.ops.dispatch import Unsupported, unsupported_dtype

_K, _M = 1 << 10, 1 << 20
UNLIMITED = 2147483647  # the operation's default for pre_tockens and next_tockens
COMPRESSED = 2048  # rows and columns of the mask that sparse modes 2, 3 and 4 share

# sparse_mode
NONE, FULL, TOP_LEFT, BOTTOM_RIGHT, BAND = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class NpuCall:
    """The arguments of ``npu_fusion_attention`` other than tensors and masks.

    Attributes:
        input_layout: SBH, BSH, BSND, BNSD or TND; SBND is passed as SBH, which has the same memory layout.
        sparse_mode: 0 none, 1 full mask, 2 causal from the top left, 3 from the bottom right, 4 band.
        pre_tockens: with the band, window_left counted from the diagonal that ends at the bottom right.
        next_tockens: with the band, window_right counted from the same diagonal.
        inner_precise: 2 makes the operation check for queries that see no key, and return zeros for them.
        cu_seqlens: for TND, the end of each sequence, for queries and for keys, counted from the first token.
    """

    input_layout: str
    head_num: int
    scale: float
    keep_prob: float
    sparse_mode: int
    pre_tockens: int = UNLIMITED
    next_tockens: int = UNLIMITED
    inner_precise: int = 0
    cu_seqlens: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def plan_call(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None
) -> NpuCall | Unsupported:
    """Return the kernel arguments for ``spec``, or the reason why the kernel does not support it.

    Tensor values are not read.
    """
    return npu_call(query.shape, key.shape, value.shape, query.dtype, spec)


@lru_cache(maxsize=64)  # every layer of every step asks
def npu_call(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], dtype: torch.dtype, spec: AttentionSpec
) -> NpuCall | Unsupported:
    """Return the arguments of ``npu_fusion_attention`` for tensors of the given shapes and dtype."""
    mode = _sparse_mode(spec)
    if isinstance(mode, Unsupported):
        return mode
    reason = _limits(query, key, value, dtype, spec) or _packed_limits(spec)
    if reason is not None:
        return Unsupported(reason)
    sparse_mode, pre_tockens, next_tockens = mode
    zero_rows = spec.masked or any(s.has_fully_masked_rows() for s in spec.segments)
    return NpuCall(
        input_layout="SBH" if spec.layout == "SBND" else spec.layout,
        head_num=spec.heads,
        scale=spec.scale,
        keep_prob=1.0 - spec.dropout_p,
        sparse_mode=sparse_mode,
        pre_tockens=pre_tockens,
        next_tockens=next_tockens,
        inner_precise=2 if zero_rows else 0,
        cu_seqlens=_cu_seqlens(spec) if spec.packed else None,
    )


def _mode_without_band(segments: Sequence[Segment]) -> int | None:
    """Return the sparse mode for segments that have no window or only a causal mask, and None for other
    segments.
    """
    if any(s.window_left is not None for s in segments):
        return None
    if all(s.window_right is None for s in segments):
        return NONE
    if all(s.window_right == 0 for s in segments):
        return TOP_LEFT
    return BOTTOM_RIGHT if all(s.window_right == s.excess for s in segments) else None


def _sparse_mode(spec: AttentionSpec) -> tuple[int, int, int] | Unsupported:
    """Return the arguments ``(sparse_mode, pre_tockens, next_tockens)`` for ``npu_fusion_attention``."""
    if spec.masked:
        return FULL, UNLIMITED, UNLIMITED
    live = [s for s in spec.segments if s.q0 < s.q1 and s.k0 < s.k1]
    mode = _mode_without_band(live)
    if mode is not None:
        return mode, UNLIMITED, UNLIMITED
    window = window_from_end(spec.segments)
    if window is None:
        return Unsupported("the windows of the sequences end at different offsets from the sequence end")
    left, right = (UNLIMITED if limit is None else limit for limit in window)
    for s in spec.segments:
        queries, keys = s.q1 - s.q0, s.k1 - s.k0
        if not _band_meets(left, right, queries, keys):
            return Unsupported(
                f"a band of {left} tokens before and {right} after the end is not supported for "
                f"{queries}×{keys} pairs"
            )
    return BAND, left, right


def _band_meets(window_left: int, window_right: int, queries: int, keys: int) -> bool:
    """Return True if ``npu_fusion_attention`` is documented to support this window, which may have a
    negative limit.
    """
    if window_left < 0:
        return window_right >= -window_left and -window_left < queries
    return window_right >= 0 or (window_left >= -window_right and -window_right < keys)


def _limits(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], dtype: torch.dtype, spec: AttentionSpec
) -> str | None:
    """Return the documented limit of ``npu_fusion_attention`` that the shapes exceed, or None."""
    if reason := unsupported_dtype("npu_fusion_attention", dtype):
        return reason
    if key != value:
        return f"keys and values must have the same shape, but got {tuple(key)} and {tuple(value)}"
    batch, heads, queries, size = bnsd_shape(query, spec.layout, spec.heads)
    keys = bnsd_shape(key, spec.layout, spec.key_heads)[2]
    for what, number, largest in (
        ("batch", batch, 2 * _M),
        ("number of heads", heads, 256),
        ("number of queries", queries, _M),
        ("number of keys", keys, _M),
        ("head size", size, 768),
    ):
        if not 1 <= number <= largest:
            return f"the {what} {number} is outside the supported range from 1 to {largest}"
    return None


def _packed_limits(spec: AttentionSpec) -> str | None:
    if not spec.packed:
        return None
    if len(spec.segments) > _K:
        return f"{len(spec.segments)} packed sequences exceed the supported maximum of {_K}"
    if any(s.has_fully_masked_rows() for s in spec.segments):
        return "some packed queries see no key"
    return None


def _cu_seqlens(spec: AttentionSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ends of the packed sequences in the kernel's format, without the leading 0 and without
    empty sequences.
    """
    there = [s for s in spec.segments if s.q0 < s.q1 or s.k0 < s.k1]
    return tuple(s.q1 for s in there), tuple(s.k1 for s in there)


@operation.on("npu", plan=plan_call)
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    *,
    plan: NpuCall,
    sink: Tensor | None = None,
) -> Tensor:
    """Pass the tensors to the kernel in their own layout, without permuting them or building a full mask.

    A ``sink``, fp32 ``[n]``, is passed only if it is given: older torch_npu versions have no such argument.
    """
    import torch_npu

    if spec.layout == "SBND":
        query, key, value = (t.flatten(2) for t in _contiguous_qkv(query, key, value))
    # the operation takes lists only
    ends = (None, None) if plan.cu_seqlens is None else tuple(list(each) for each in plan.cu_seqlens)
    output = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        plan.head_num,
        plan.input_layout,
        atten_mask=atten_mask(plan, query, spec, mask),
        scale=plan.scale,
        keep_prob=plan.keep_prob,
        pre_tockens=plan.pre_tockens,
        next_tockens=plan.next_tockens,
        inner_precise=plan.inner_precise,
        actual_seq_qlen=ends[0],
        actual_seq_kvlen=ends[1],
        sparse_mode=plan.sparse_mode,
        **({} if sink is None else {"sink": sink}),
    )[0].contiguous()
    return output.unflatten(2, (spec.heads, -1)) if spec.layout == "SBND" else output


def _contiguous_qkv(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make query, key and value contiguous if they are interleaved in memory, as after a fused QKV
    projection.

    This takes a single copy instead of three.
    """
    first, second, third = (t.storage_offset() for t in (query, key, value))
    step = second - first
    same = all(
        t.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
        and (t.shape, t.stride(), t.dtype) == (query.shape, query.stride(), query.dtype)
        for t in (key, value)
    )
    if not same or step <= 0 or third - second != step or query.is_contiguous():
        return query, key, value
    return _ContiguousQKV.apply(query, key, value, step)


class _ContiguousQKV(torch.autograd.Function):
    """Copy three tensors that are interleaved in memory at a distance of ``step`` values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, step: int) -> tuple[Tensor, ...]:
        together = query.as_strided((3, *query.shape), (step, *query.stride()))
        return together.contiguous().unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*grads, None)


def atten_mask(call: NpuCall, query: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor | None:
    """Return the kernel's ``atten_mask``, which is True for masked pairs.

    The result is None, the shared triangle, or the full mask.

    Args:
        call: the call that the mask is for.
        query: the query in the layout of the call.
        spec: the requested attention.
        mask: the caller's mask, with four dimensions.
    """
    if mask is None:
        return shared_mask(call.sparse_mode, query.device)
    segment, heads = spec.segments[0], spec.heads
    batch = bnsd_shape(query.shape, call.input_layout, heads)[0]
    key = (spec.segments, batch, heads)
    return cache_on_tensor(mask, "full", lambda: _full_mask(mask, segment, batch, heads), key)


def shared_mask(sparse_mode: int, device: torch.device) -> Tensor | None:
    """Return the ``atten_mask`` for an attention call in which the caller passes no mask."""
    return None if sparse_mode == NONE else _compressed_mask(device)


def _full_mask(mask: Tensor, segment: Segment, batch: int, heads: int) -> Tensor:
    """Combine ``mask`` and the window into a mask of one of the documented shapes, which are SS, B1SS and
    BNSS.
    """
    forbidden = forbidden_pairs(segment, mask.device)
    mask = mask if forbidden is None else mask | forbidden
    pairs = (segment.q1 - segment.q0, segment.k1 - segment.k0)
    if mask.size(0) == mask.size(1) == 1:
        return mask[0, 0].expand(pairs).contiguous()
    return mask.expand(batch, 1 if mask.size(1) == 1 else heads, *pairs).contiguous()


@lru_cache_tensors(maxsize=8)  # one a device
def _compressed_mask(device: torch.device) -> Tensor:
    """Return the compressed causal mask that all calls with ``sparse_mode`` 2, 3 or 4 on a device share.

    The mask takes 4 MiB for any sequence length.
    """
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)
