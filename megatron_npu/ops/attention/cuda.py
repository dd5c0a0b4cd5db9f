"""Compute attention on CUDA with cuDNN, flash-attn or SDPA, or with FlexAttention for windows and packed
sequences.

On Hopper and later GPUs, cuDNN's kernel is the fastest for the calls that it supports: causal or full
attention in 16 bits.

The kernels of cuDNN and torch have been run on an H100; flash-attn and FlexAttention have not been run on a
GPU: only their selection and the masks passed to them are tested (docs/reference/attention.md).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.base.installed_packages import is_installed
from megatron_npu.ops.attention.layouts import bnsd_shape, from_bnsd, to_bnsd
from megatron_npu.ops.attention.reference import operation
from megatron_npu.ops.attention.spec import (
    AttentionSpec,
    Segment,
    Window,
    forbidden_pairs,
    visible_ranges,
    window_from_end,
)
from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.ops.dispatch import Unsupported, note_slower

# Head sizes of FlexAttention's kernel templates; flash-attn 2 takes any multiple of 8 up to 256.
_FLEX_SIZES = (16, 32, 64, 128, 256)
_FLASH_DTYPES = (torch.float16, torch.bfloat16)

# What cuDNN's is asked for: it makes a plan for each new length, which takes as long as many short calls.
_CUDNN_STEP, _CUDNN_FEWEST, _CUDNN_WIDEST = 64, 256, 128
_CUDNN_SINCE = 9  # compute capability; before, flash kernels are as fast
# Numbers of torch's SDPBackend: cuDNN, flash, memory-efficient, math, a device's own.
_CUDNN_FIRST = (3, 1, 2, 0, 4)


class Kernel(enum.Enum):
    """A kernel that can compute an attention call."""

    CUDNN = "cuDNN's, through torch's scaled_dot_product_attention"
    FLASH_ATTN = "flash-attn"
    SDPA = "torch's scaled_dot_product_attention"
    FLEX = "FlexAttention"


@dataclass(frozen=True)
class CudaCall:
    """The kernel that was chosen for an attention call, with the arguments for flash-attn.

    Attributes:
        window: (window_left, window_right) with the last query aligned with the last key.
        max_seqlens: for packed sequences, the maximum numbers of queries and keys.
    """

    kernel: Kernel
    window: Window = (None, None)
    max_seqlens: tuple[int, int] = (0, 0)


def plan_call(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None
) -> CudaCall | Unsupported:
    """Return the kernel for ``spec``, or the reason why no kernel supports it.

    Tensor values are not read.
    """
    # cuDNN adds up gradients in any order
    cudnn = _has_cudnn() and not torch.are_deterministic_algorithms_enabled()
    return choose(query.shape, key.shape, value.shape, query.dtype, spec, _flash_attn_installed(), cudnn)


@lru_cache(maxsize=1)
def _has_cudnn() -> bool:
    """Return True if this process should try cuDNN's attention on its GPU."""
    if not hasattr(torch._C, "_set_sdp_priority_order"):  # before torch 2.6
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= _CUDNN_SINCE


@lru_cache(maxsize=64)  # every layer of every step asks
def choose(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dtype: torch.dtype,
    spec: AttentionSpec,
    flash_attn: bool,
    cudnn: bool = False,
) -> CudaCall | Unsupported:
    """Choose the kernel for ``spec`` from the tensors' shapes, the dtype and the installed packages."""
    sizes = _head_sizes(query, key, value, spec)
    if cudnn and dtype in _FLASH_DTYPES and _fits_cudnn(spec, sizes):
        return CudaCall(Kernel.CUDNN)
    if flash_attn and dtype in _FLASH_DTYPES:
        call = _flash_attn_call(spec, sizes)
        if call is not None:
            return call
    if not spec.packed and (spec.masked or _is_simple(spec.segments[0])):
        return CudaCall(Kernel.SDPA)
    if spec.dropout_p:
        return Unsupported("dropout with a window or packed sequences requires flash-attn")
    if sizes[0] != sizes[2] or sizes[0] not in _FLEX_SIZES:
        return Unsupported(f"FlexAttention does not support head sizes {sizes[0]} and {sizes[2]}")
    return CudaCall(Kernel.FLEX)


def _fits_cudnn(spec: AttentionSpec, sizes: tuple[int, ...]) -> bool:
    if spec.packed or spec.masked or not _is_simple(spec.segments[0]):
        return False
    segment = spec.segments[0]
    queries, keys = segment.q1 - segment.q0, segment.k1 - segment.k0
    even = not queries % _CUDNN_STEP and not keys % _CUDNN_STEP and min(queries, keys) >= _CUDNN_FEWEST
    causal = segment.window_right == 0
    return even and (queries == keys or not causal) and _fit_flash_attn(sizes) and sizes[0] <= _CUDNN_WIDEST


def _fit_flash_attn(sizes: tuple[int, ...]) -> bool:
    return len(set(sizes)) == 1 and sizes[0] % 8 == 0 and sizes[0] <= 256


def _head_sizes(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], spec: AttentionSpec
) -> tuple[int, ...]:
    shapes = ((query, spec.heads), (key, spec.key_heads), (value, spec.key_heads))
    return tuple(bnsd_shape(shape, spec.layout, heads)[3] for shape, heads in shapes)


def _is_simple(segment: Segment) -> bool:
    """Return True if a segment has a single query, no mask or only a causal mask."""
    triangle = segment.window_left is None and segment.window_right in (None, 0)
    return triangle or segment.q1 - segment.q0 == 1


def _flash_attn_call(spec: AttentionSpec, sizes: tuple[int, ...]) -> CudaCall | None:
    """Return the arguments for flash-attn, or None if flash-attn does not support the attention call.

    ``sizes`` are the head sizes.
    """
    window = window_from_end(spec.segments)
    if window is None or any(limit is not None and limit < 0 for limit in window):
        return None
    if spec.masked or not _fit_flash_attn(sizes):
        return None
    longest = max(s.q1 - s.q0 for s in spec.segments), max(s.k1 - s.k0 for s in spec.segments)
    return CudaCall(Kernel.FLASH_ATTN, window, longest)


@lru_cache(maxsize=1)
def _flash_attn_installed() -> bool:
    return is_installed("flash_attn")


@operation.on("cuda", plan=plan_call)
def attend(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None, *, plan: CudaCall
) -> Tensor:
    """Compute attention with the kernel that ``plan`` selects."""
    if plan.kernel is Kernel.FLASH_ATTN:
        return _flash_attn(query, key, value, spec, plan)
    query = to_bnsd(query, spec.layout, spec.heads)
    key, value = (to_bnsd(t, spec.layout, spec.key_heads) for t in (key, value))
    if plan.kernel is Kernel.FLEX:
        output = _flex(query, key, value, spec)
    else:
        with _order_of(plan.kernel, query, key, value, spec):
            output = _sdpa(query, key, value, spec, mask)
    return from_bnsd(output, spec.layout).contiguous()


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, plan: CudaCall) -> Tensor:
    """Call flash-attn 2 on ``[b, s, n, d]`` or packed ``[t, n, d]``.

    flash-attn represents "no limit" by -1.
    """
    import flash_attn

    options: dict[str, Any] = {
        "dropout_p": spec.dropout_p,
        "softmax_scale": spec.scale,
        "window_size": tuple(-1 if limit is None else limit for limit in plan.window),
        # else its backward adds up keys' gradients in any order
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if spec.packed:
        cu_seqlens = _cu_seqlens(spec.segments, query.device)
        return flash_attn.flash_attn_varlen_func(query, key, value, *cu_seqlens, *plan.max_seqlens, **options)
    query = to_bnsd(query, spec.layout, spec.heads)
    key, value = (to_bnsd(t, spec.layout, spec.key_heads) for t in (key, value))
    output = flash_attn.flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), **options)
    return from_bnsd(output.transpose(1, 2), spec.layout).contiguous()


@lru_cache_tensors(maxsize=16)  # the same batch comes back at every layer
def _cu_seqlens(segments: tuple[Segment, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sequence boundaries of queries and keys: two int32 tensors ``[sequences + 1]``."""
    queries, keys = [0, *(s.q1 for s in segments)], [0, *(s.k1 for s in segments)]
    as_int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    return as_int32(queries), as_int32(keys)


@contextlib.contextmanager
def _order_of(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> Iterator[None]:
    """Make torch's SDPA prefer cuDNN's kernel inside the ``with`` block, if that kernel was chosen and
    supports the call.
    """
    if kernel is not Kernel.CUDNN or not _cudnn_takes(query, key, value, spec):
        yield
        return
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(list(_CUDNN_FIRST))
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def _cudnn_takes(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    """Return True if torch reports that the installed cuDNN supports the attention call."""
    causal, grouped = spec.segments[0].window_right == 0, spec.heads != spec.key_heads
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, spec.dropout_p, causal, grouped)
    if torch.backends.cuda.can_use_cudnn_attention(asked):
        return True
    note_slower(
        "attention",
        "this version of torch or cuDNN has no kernel for the call",
        "runs on torch's flash kernel instead of cuDNN's",
    )
    return False


def _sdpa(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Call torch's SDPA on ``[b, n, s, d]``.

    SDPA selects its flash, cuDNN or memory-efficient kernel.
    """
    segment = spec.segments[0]
    options: dict[str, Any] = {
        "dropout_p": spec.dropout_p,
        "scale": spec.scale,
        "enable_gqa": spec.heads != spec.key_heads,
    }
    first, last = segment.visible_keys(0, 1)
    if mask is None and query.size(2) == 1 and first == last:  # zeros, and gradients of zero for all three
        mask = query.new_ones((1, 1, 1, key.size(2)), dtype=torch.bool)
    if mask is None:
        if query.size(2) == 1:  # decoding: one query sees one run of keys, and no mask is needed
            key, value = key[:, :, first:last], value[:, :, first:last]
        causal = query.size(2) > 1 and segment.window_right == 0
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, **options)
    forbidden = forbidden_pairs(segment, query.device)
    mask = mask if forbidden is None else mask | forbidden
    # Kernels differ about a row that is fully masked, and may answer nan: let it see all, zero the result.
    fully_masked = mask.all(-1, keepdim=True)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=~mask | fully_masked, **options)
    return output.masked_fill(fully_masked, 0.0)


def _flex(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Compute attention with FlexAttention, which skips blocks of 128 × 128 query-key pairs that are
    completely masked.
    """
    blocks = _block_mask(spec.segments, query.size(2), key.size(2), query.device)
    grouped = spec.heads != spec.key_heads
    return _compiled("flex_attention")(
        query, key, value, block_mask=blocks, scale=spec.scale, enable_gqa=grouped
    )


@lru_cache_tensors(maxsize=16)
def _block_mask(segments: tuple[Segment, ...], queries: int, keys: int, device: torch.device) -> Any:
    """Return the FlexAttention block mask of the segments and windows.

    The block mask is the same for all batches and heads.
    """
    create = _compiled("create_block_mask")
    return create(visibility(segments, device), None, None, queries, keys, device=device)


def visibility(segments: tuple[Segment, ...], device: torch.device) -> Callable[..., Tensor]:
    """Return a ``mask_mod`` function for FlexAttention, which tells whether query i attends to key j."""
    begins, ends = visible_ranges(segments, device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= begins[query]) & (key < ends[query])

    return sees


@lru_cache(maxsize=2)
def _compiled(name: str) -> Callable[..., Any]:
    """Return a compiled FlexAttention function.

    torch recompiles it for each new class of shapes.

    Without compilation, both functions would build all ``[sq, sk]`` pairs.
    """
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name))
