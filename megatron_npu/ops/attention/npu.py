"""Attention on the NPU: ``torch_npu.npu_fusion_attention``, one table from case to call.

What is checked is what torch_npu's own documentation of the operation states (torch_npu 2.13.0,
``_op_plugin_docs.py``): a call outside it may be wrong without an error, so it is refused beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.attention.layouts import bnsd_shape
from megatron_npu.ops.attention.reference import operation
from megatron_npu.ops.attention.spec import Case, Segment, forbidden_pairs, window_from_the_end
from megatron_npu.ops.caching import cache_on_tensor, lru_cache_tensors

_K, _M = 1 << 10, 1 << 20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNLIMITED = 2147483647  # the operation's default for pre_tockens and next_tockens
COMPRESSED = 2048  # rows and columns of the mask that sparse modes 2, 3 and 4 share

# sparse_mode
NONE, FULL, TOP_LEFT, BOTTOM_RIGHT, BAND = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class NpuCall:
    """The arguments of ``npu_fusion_attention`` that follow from a case; tensors and masks apart.

    Attributes:
        input_layout: SBH, BSH, BSND, BNSD or TND; SBND is handed over as SBH, which is the same memory.
        sparse_mode: 0 none, 1 full mask, 2 causal from the top left, 3 from the bottom right, 4 band.
        pre_tockens: with the band: keys before the diagonal that ends at the bottom right.
        next_tockens: likewise, keys behind it.
        inner_precise: 2 makes the operation look for queries that see no key, and give zeros for them.
        lengths: of TND, where each document ends: queries and keys, counted from the first token.
    """

    input_layout: str
    head_num: int
    scale: float
    keep_prob: float
    sparse_mode: int
    pre_tockens: int = UNLIMITED
    next_tockens: int = UNLIMITED
    inner_precise: int = 0
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def npu_call(query: Tensor, key: Tensor, value: Tensor, case: Case) -> NpuCall | str:
    """Return the call for ``case``, or why the operation does not take it; reads no tensor's values."""
    mode = _sparse_mode(case)
    if isinstance(mode, str):
        return mode
    reason = _limits(query, key, value, case) or _packed_limits(case)
    if reason is not None:
        return reason
    sparse_mode, pre, after = mode
    blind = case.mask is not None or any(s.has_blind_queries() for s in case.segments)
    return NpuCall(
        input_layout="SBH" if case.layout == "SBND" else case.layout,
        head_num=case.heads,
        scale=case.scale,
        keep_prob=1.0 - case.dropout_p,
        sparse_mode=sparse_mode,
        pre_tockens=pre,
        next_tockens=after,
        inner_precise=2 if blind else 0,
        lengths=_ends(case) if case.packed else None,
    )


def _sparse_mode(case: Case) -> tuple[int, int, int] | str:
    """Return (sparse_mode, pre_tockens, next_tockens)."""
    if case.mask is not None:
        return FULL, UNLIMITED, UNLIMITED
    live = [s for s in case.segments if s.q0 < s.q1 and s.k0 < s.k1]
    if all(s.low is None for s in live):
        if all(s.high is None for s in live):
            return NONE, UNLIMITED, UNLIMITED
        if all(s.high == 0 for s in live):
            return TOP_LEFT, UNLIMITED, UNLIMITED
        if all(s.high == s.excess for s in live):
            return BOTTOM_RIGHT, UNLIMITED, UNLIMITED
    window = window_from_the_end(case.segments)
    if window is None:
        return "documents whose windows lie differently towards their ends"
    pre, after = (UNLIMITED if limit is None else limit for limit in window)
    for s in case.segments:
        if not _band_meets(pre, after, s.q1 - s.q0, s.k1 - s.k0):
            return (
                f"a band of {pre} tokens before and {after} behind the end, {s.q1 - s.q0}×{s.k1 - s.k0} pairs"
            )
    return BAND, pre, after


def _band_meets(pre: int, after: int, queries: int, keys: int) -> bool:
    """Whether a band with a negative limit is one that the operation documents."""
    if pre < 0:
        return after >= -pre and -pre < queries
    return after >= 0 or (pre >= -after and -after < keys)


def _limits(query: Tensor, key: Tensor, value: Tensor, case: Case) -> str | None:
    """Return which documented limit of the operation the tensors exceed."""
    if query.dtype not in _DTYPES:
        return f"dtype {query.dtype}"
    if key.shape != value.shape:
        return f"keys {tuple(key.shape)} and values {tuple(value.shape)} of different shapes"
    batch, heads, queries, size = bnsd_shape(query, case.layout, case.heads)
    keys = bnsd_shape(key, case.layout, case.key_heads)[2]
    for what, number, largest in (
        ("batch", batch, 2 * _M),
        ("number of heads", heads, 256),
        ("number of queries", queries, _M),
        ("number of keys", keys, _M),
        ("head size", size, 768),
    ):
        if not 1 <= number <= largest:
            return f"{what} {number}, 1 to {largest} are supported"
    return None


def _packed_limits(case: Case) -> str | None:
    if not case.packed:
        return None
    if len(case.segments) > _K:
        return f"{len(case.segments)} packed documents, {_K} are supported"
    if any(s.has_blind_queries() for s in case.segments):
        return "packed queries that see no key"
    return None


def _ends(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    there = [s for s in case.segments if s.q0 < s.q1 or s.k0 < s.k1]
    return tuple(s.q1 for s in there), tuple(s.k1 for s in there)


def refusal(query: Tensor, key: Tensor, value: Tensor, case: Case) -> str | None:
    """Return why ``npu_fusion_attention`` does not take the call, or None."""
    call = npu_call(query, key, value, case)
    return call if isinstance(call, str) else None


def fitting_call(query: Tensor, key: Tensor, value: Tensor, case: Case) -> NpuCall:
    """Return the call for ``case``, of which ``refusal`` has said that there is one."""
    call = npu_call(query, key, value, case)
    assert isinstance(call, NpuCall), call
    return call


@operation.on("npu", supports=refusal)
def attend(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """Hand the tensors over in their own layout; nothing is permuted, no ``[b, 1, s, s]`` is built."""
    import torch_npu

    call = fitting_call(query, key, value, case)
    if case.layout == "SBND":
        query, key, value = (t.flatten(2) for t in _apart(query, key, value))
    ends = (None, None) if call.lengths is None else tuple(list(each) for each in call.lengths)
    output = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        call.head_num,
        call.input_layout,
        atten_mask=mask_of(call, query, case),
        scale=call.scale,
        keep_prob=call.keep_prob,
        pre_tockens=call.pre_tockens,
        next_tockens=call.next_tockens,
        inner_precise=call.inner_precise,
        actual_seq_qlen=ends[0],
        actual_seq_kvlen=ends[1],
        sparse_mode=call.sparse_mode,
    )[0]
    output = output.contiguous()
    return output.unflatten(2, (case.heads, -1)) if case.layout == "SBND" else output


def _apart(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three contiguous where they interleave in one tensor, as a joint projection leaves them.

    That takes one copy; one by one they take three.
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
    return _Apart.apply(query, key, value, step)


class _Apart(torch.autograd.Function):
    """Copies of three tensors that lie ``step`` values from each other in one memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, step: int) -> tuple[Tensor, ...]:
        together = query.as_strided((3, *query.shape), (step, *query.stride()))
        return together.contiguous().unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*grads, None)


def mask_of(call: NpuCall, query: Tensor, case: Case) -> Tensor | None:
    """Return the atten_mask of the call: none, the shared triangle, or all of it, True where masked."""
    if call.sparse_mode == NONE:
        return None
    if call.sparse_mode != FULL:
        return _compressed_mask(query.device)
    mask, segment, heads = case.mask, case.segments[0], case.heads
    batch = bnsd_shape(query, call.input_layout, heads)[0]
    recipe = (case.segments, batch, heads)
    return cache_on_tensor(mask, "full", lambda: _full_mask(mask, segment, batch, heads), recipe)


def _full_mask(mask: Tensor, segment: Segment, batch: int, heads: int) -> Tensor:
    """Return ``mask`` and the diagonals in one of the documented shapes: SS, B1SS or BNSS."""
    forbidden = forbidden_pairs(segment, mask.device)
    mask = mask if forbidden is None else mask | forbidden
    pairs = (segment.q1 - segment.q0, segment.k1 - segment.k0)
    if mask.size(0) == mask.size(1) == 1:
        return mask[0, 0].expand(pairs).contiguous()
    return mask.expand(batch, 1 if mask.size(1) == 1 else heads, *pairs).contiguous()


@lru_cache_tensors(maxsize=8)  # one a device
def _compressed_mask(device: torch.device) -> Tensor:
    """The one mask of sparse modes 2, 3 and 4 on a device: 4 MiB, whatever the length of the sequence."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)
