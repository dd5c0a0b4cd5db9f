"""Attention on CUDA: flash-attn if it is installed, else torch's SDPA, FlexAttention for bands and documents.

Written without a GPU at hand: which kernel is chosen and what masks it is given are tested, the kernels on
a GPU are not (docs/attention.md).
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.attention.layouts import bnsd_shape, from_bnsd, to_bnsd
from megatron_npu.ops.attention.reference import operation
from megatron_npu.ops.attention.spec import (
    Case,
    Segment,
    forbidden_pairs,
    visible_ranges,
    window_from_the_end,
)
from megatron_npu.ops.caching import lru_cache_tensors

# Head sizes of FlexAttention's kernel templates; flash-attn 2 takes any multiple of 8 up to 256.
_FLEX_SIZES = (16, 32, 64, 128, 256)
_FLASH_DTYPES = (torch.float16, torch.bfloat16)


class Kernel(enum.Enum):
    """Who computes a call."""

    FLASH_ATTN = "flash-attn"
    SDPA = "torch's scaled_dot_product_attention"
    FLEX = "FlexAttention"


def choose(query: Tensor, key: Tensor, value: Tensor, case: Case, flash_attn: bool) -> Kernel | str:
    """Return the kernel for ``case``, or why there is none; reads shapes and dtypes only.

    Args:
        query: in the layout of ``case``, as are ``key`` and ``value``.
        key: see ``query``.
        value: see ``query``.
        case: what is asked for.
        flash_attn: whether the package flash-attn is installed.
    """
    sizes = tuple(bnsd_shape(t, case.layout, n)[3] for t, n in _heads(query, key, value, case))
    if flash_attn and query.dtype in _FLASH_DTYPES and _flash_attn_takes(case, sizes):
        return Kernel.FLASH_ATTN
    segment = case.segments[0]
    triangle = segment.low is None and segment.high in (None, 0)
    one_query = segment.q1 - segment.q0 == 1 and case.mask is None
    if not case.packed and (case.mask is not None or one_query or triangle):
        return Kernel.SDPA
    if case.dropout_p:
        return "dropout with a window or documents needs flash-attn"
    if sizes[0] != sizes[2] or sizes[0] not in _FLEX_SIZES:
        return f"FlexAttention with head sizes {sizes[0]} and {sizes[2]}"
    return Kernel.FLEX


def _heads(query: Tensor, key: Tensor, value: Tensor, case: Case) -> tuple[tuple[Tensor, int], ...]:
    return (query, case.heads), (key, case.key_heads), (value, case.key_heads)


def _flash_attn_takes(case: Case, sizes: tuple[int, ...]) -> bool:
    window = window_from_the_end(case.segments)
    fits = window is not None and all(limit is None or limit >= 0 for limit in window)
    return fits and case.mask is None and len(set(sizes)) == 1 and sizes[0] % 8 == 0 and sizes[0] <= 256


@lru_cache(maxsize=1)
def _flash_attn_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def refusal(query: Tensor, key: Tensor, value: Tensor, case: Case) -> str | None:
    """Return why no kernel takes the call, or None."""
    kernel = choose(query, key, value, case, _flash_attn_installed())
    return kernel if isinstance(kernel, str) else None


@operation.on("cuda", supports=refusal)
def attend(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    kernel = choose(query, key, value, case, _flash_attn_installed())
    if kernel is Kernel.FLASH_ATTN:
        return _flash_attn(query, key, value, case)
    query, key, value = (to_bnsd(t, case.layout, n) for t, n in _heads(query, key, value, case))
    compute = _sdpa if kernel is Kernel.SDPA else _flex
    return from_bnsd(compute(query, key, value, case), case.layout).contiguous()


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """flash-attn 2: ``[b, s, n, d]`` or packed ``[t, n, d]``; -1 is its "no limit"."""
    import flash_attn

    pre, after = window_from_the_end(case.segments) or (None, None)
    options: dict[str, Any] = {
        "dropout_p": case.dropout_p,
        "softmax_scale": case.scale,
        "window_size": tuple(-1 if limit is None else limit for limit in (pre, after)),
        # else its backward adds up keys' gradients in any order
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if case.packed:
        ends = _cumulative(case.segments, query.device)
        longest = tuple(max(s[2 * i + 1] - s[2 * i] for s in case.segments) for i in range(2))
        return flash_attn.flash_attn_varlen_func(query, key, value, *ends, *longest, **options)
    tensors = (to_bnsd(t, case.layout, n).transpose(1, 2) for t, n in _heads(query, key, value, case))
    return from_bnsd(
        flash_attn.flash_attn_func(*tensors, **options).transpose(1, 2), case.layout
    ).contiguous()


@lru_cache_tensors(maxsize=16)  # the same batch comes back at every layer
def _cumulative(segments: tuple[Segment, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where documents begin and the last one ends, queries and keys: two int32 ``[documents + 1]``."""
    queries, keys = [0, *(s.q1 for s in segments)], [0, *(s.k1 for s in segments)]
    as_int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    return as_int32(queries), as_int32(keys)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """torch picks its flash, cuDNN or memory-efficient kernel. ``[b, n, s, d]`` throughout."""
    segment = case.segments[0]
    options: dict[str, Any] = {
        "dropout_p": case.dropout_p,
        "scale": case.scale,
        "enable_gqa": case.heads != case.key_heads,
    }
    if case.mask is None:
        if query.size(2) == 1:  # decoding: one query sees one run of keys, and no mask is needed
            first, last = segment.keys_of(0, 1)
            if first == last:
                return 0 * query[..., :1].expand(*query.shape[:3], value.size(3))
            key, value = key[:, :, first:last], value[:, :, first:last]
        causal = query.size(2) > 1 and segment.high == 0
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, **options)
    forbidden = forbidden_pairs(segment, query.device)
    mask = case.mask if forbidden is None else case.mask | forbidden
    # Kernels differ about a query that sees no key, and may answer nan: let it see all, and zero the result.
    blind = mask.all(-1, keepdim=True)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=~mask | blind, **options)
    return output.masked_fill(blind, 0.0)


def _flex(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """FlexAttention skips the blocks of 128 × 128 pairs in which nothing is visible."""
    blocks = _block_mask(case.segments, query.size(2), key.size(2), query.device)
    grouped = case.heads != case.key_heads
    return _compiled("flex_attention")(
        query, key, value, block_mask=blocks, scale=case.scale, enable_gqa=grouped
    )


@lru_cache_tensors(maxsize=16)
def _block_mask(segments: tuple[Segment, ...], queries: int, keys: int, device: torch.device) -> Any:
    """Return the block mask of the documents and their diagonals, the same for all batches and heads."""
    create = _compiled("create_block_mask")
    return create(visibility(segments, device), None, None, queries, keys, device=device)


def visibility(segments: tuple[Segment, ...], device: torch.device) -> Callable[..., Tensor]:
    """Return FlexAttention's ``mask_mod``: whether query i sees key j."""
    begins, ends = visible_ranges(segments, device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= begins[query]) & (key < ends[query])

    return sees


@lru_cache(maxsize=2)
def _compiled(name: str) -> Callable[..., Any]:
    """Return a function of FlexAttention compiled; torch compiles it again for each new class of shapes.

    Uncompiled, both would build all ``[sq, sk]`` pairs.
    """
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name))
