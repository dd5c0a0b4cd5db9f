"""Exact attention tile by tile on the CPU: windows, documents, masks and dropout without ``[sq, sk]``.

A tile is a run of queries against all keys that any of them sees, for as many heads as fit. As a tile holds
whole rows of scores, softmax needs no running maximum, and backward recomputes it instead of saving anything
(Chen et al. 2016; the gradient of softmax as in Dao et al. 2022, FlashAttention, appendix B). Work and memory
grow with queries × visible keys; no scratch tensor exceeds ``TILE_AREA`` elements or one row of scores.

Inside, queries are ``[g, s, r, d]``: g key heads of all batches, r query heads for each; keys have r = 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd
from megatron_npu.ops.attention.spec import Case, Segment
from megatron_npu.ops.caching import lru_cache_tensors

# Measured on a Xeon with AMX, one core, head size 64: fp32 is slower with other numbers, bf16 products
# want taller tiles; scratch of 2^18 elements costs up to 10 %, and beyond 2^20 nothing is gained.
TILE_ROWS = {torch.bfloat16: 256}
TILE_ROWS_ELSE = 128
TILE_AREA = 1 << 20


def blockwise(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """Return the attention that ``case`` describes, contiguous in its layout; differentiable once."""
    return _Blockwise.apply(query, key, value, case)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.case = case
        # One draw from the default generator, which Megatron's RNG tracker has put in place, decides every
        # mask of this call: a recomputed forward and the backward drop the same weights.
        ctx.seed = int(torch.randint(2**62, (), device="cpu")) if case.dropout_p else 0
        q, k, v = (
            _grouped(query, case, case.heads),
            *(_grouped(t, case, case.key_heads) for t in (key, value)),
        )
        result = q.new_zeros(*q.shape[:-1], v.size(-1))
        with _products_of(query.dtype):
            scratch = _Scratch(q.dtype, ctx.seed, case)
            for tile in _tiles(q.size(0), query.dtype, case):
                weights = scratch.softmax(tile, tile.rows(q), tile.columns(k))
                output = tile.rows(result)
                dropped = scratch.drop(weights, out=weights)
                torch.baddbmm(output, dropped, tile.columns(v), beta=0, alpha=scratch.gain, out=output)
        return _ungrouped(result, case, query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        case: Case = ctx.case
        q, g = (_grouped(t, case, case.heads) for t in (query, grad))
        k, v = (_grouped(t, case, case.key_heads) for t in (key, value))
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        with _products_of(query.dtype):
            scratch = _Scratch(q.dtype, ctx.seed, case)
            for tile in _tiles(q.size(0), query.dtype, case):
                _tile_backward(tile, scratch, (q, k, v, g), (dq, dk, dv), case.scale)
        return (*(_ungrouped(t, case, query.dtype) for t in (dq, dk, dv)), None)


def _tile_backward(
    tile: _Tile, scratch: _Scratch, tensors: tuple[Tensor, ...], gradients: tuple[Tensor, ...], scale: float
) -> None:
    """Write the queries' gradient of one tile and add to its keys' and values'."""
    (q, k, v, g), (dq, dk, dv) = tensors, gradients
    rows, columns, values, grad = tile.rows(q), tile.columns(k), tile.columns(v), tile.rows(g)
    weights = scratch.softmax(tile, rows, columns)
    scores = scratch.scores_of(tile)  # free again: the weights have a tensor of their own
    dropped = scratch.drop(weights, out=scores)
    tile.columns(dv).baddbmm_(dropped.mT, grad, alpha=scratch.gain)
    torch.baddbmm(scores, grad, values.mT, beta=0, alpha=scratch.gain, out=scores)
    scratch.drop_again(scores)
    torch.ops.aten._softmax_backward_data.out(scores, weights, -1, weights.dtype, grad_input=scores)
    query_grad = tile.rows(dq)
    torch.baddbmm(query_grad, scores, columns, beta=0, alpha=scale, out=query_grad)
    tile.columns(dk).baddbmm_(scores.mT, rows, alpha=scale)


# -- tiles ------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """Heads ``[h0, h1)``, and queries ``[q0, q1)`` over keys ``[k0, k1)`` of one segment."""

    segment: Segment
    h0: int
    h1: int
    q0: int
    q1: int
    k0: int
    k1: int
    repeats: int  # query heads per key head

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.h1 - self.h0, (self.q1 - self.q0) * self.repeats, self.k1 - self.k0

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the view ``[heads, queries · r, d]`` of ``[g, s, r, d]``."""
        start = self.segment.q0
        return tensor[self.h0 : self.h1, start + self.q0 : start + self.q1].flatten(1, 2)

    def columns(self, tensor: Tensor) -> Tensor:
        """Return the view ``[heads, keys, d]`` of ``[g, s, 1, d]``."""
        start = self.segment.k0
        return tensor[self.h0 : self.h1, start + self.k0 : start + self.k1].flatten(1, 2)


def _tiles(heads: int, dtype: torch.dtype, case: Case) -> Iterator[_Tile]:
    """Cut the visible part of every segment into tiles, always in the same order."""
    repeats = case.heads // case.key_heads
    rows = max(1, TILE_ROWS.get(dtype, TILE_ROWS_ELSE) // repeats)
    # a mask may differ between batches: then the heads of one tile come from one batch
    span = heads if case.mask is None else case.key_heads
    for segment in case.segments:
        begin, last = segment.seeing()
        while begin < last:
            end = _end_of_tile(segment, begin, min(last, begin + rows), repeats)
            k0, k1 = segment.keys_of(begin, end)
            together = max(1, TILE_AREA // ((end - begin) * repeats * (k1 - k0)))
            for first in range(0, heads, span):
                for h0 in range(first, first + span, together):
                    h1 = min(h0 + together, first + span)
                    yield _Tile(segment, h0, h1, begin, end, k0, k1, repeats)
            begin = end


def _end_of_tile(segment: Segment, begin: int, end: int, repeats: int) -> int:
    """Return ``end``, or less where the keys of queries ``[begin, end)`` are too many for one tile."""
    k0, k1 = segment.keys_of(begin, end)
    return min(end, begin + max(1, TILE_AREA // (repeats * (k1 - k0))))


class _Scratch:
    """The tensors that every tile of a call uses again, and what is computed in them."""

    def __init__(self, dtype: torch.dtype, seed: int, case: Case) -> None:
        self._dtype = dtype
        self._case = case
        self._flat: dict[str, Tensor] = {}
        # Weights are kept where 16 random bits are below this number: four weights per 64-bit draw, four
        # times faster than bernoulli_. The probability is exact to 2^-17, and `gain` makes up for it.
        self._kept = max(1, round((1.0 - case.dropout_p) * 65536))
        self.gain = 65536 / self._kept
        self._generator = torch.Generator().manual_seed(seed) if case.dropout_p else None
        self._keep: Tensor | None = None

    def scores_of(self, tile: _Tile) -> Tensor:
        return self._take("scores", tile.shape, self._dtype)

    def softmax(self, tile: _Tile, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the weights ``[heads, queries · r, keys]`` before dropout."""
        scores = self.scores_of(tile)
        torch.baddbmm(scores, rows, columns.mT, beta=0, alpha=self._case.scale, out=scores)
        _forbid_diagonals(scores.unflatten(1, (-1, tile.repeats)), tile)
        seeing = None if self._case.mask is None else _forbid_masked(scores, tile, self._case)
        weights = self._take("weights", tile.shape, self._dtype)
        torch.ops.aten._softmax.out(scores, -1, False, out=weights)
        return weights if seeing is None else weights.mul_(seeing)

    def drop(self, weights: Tensor, out: Tensor) -> Tensor:
        """Return ``weights`` with a new draw of them zeroed; ``weights`` itself without dropout."""
        if self._generator is None:
            return weights
        count = weights.numel()
        bits = self._take("bits", (-(-count // 4),), torch.int64)
        bits.random_(-(2**63), None, generator=self._generator)
        self._keep = self._take("keep", weights.shape, self._dtype)
        torch.le(bits.view(torch.int16)[:count].view(weights.shape), self._kept - 32769, out=self._keep)
        return torch.mul(weights, self._keep, out=out)

    def drop_again(self, tensor: Tensor) -> None:
        """Zero in place what the last ``drop`` zeroed."""
        if self._keep is not None:
            tensor.mul_(self._keep)

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory; the same for the same name."""
        count = torch.Size(shape).numel()
        if name not in self._flat or self._flat[name].numel() < count:
            self._flat[name] = torch.empty(count, dtype=dtype, device="cpu")
        return self._flat[name][:count].view(shape)


def _forbid_diagonals(scores: Tensor, tile: _Tile) -> None:
    """Set ``[heads, queries, r, keys]`` to -inf beyond the segment's diagonals.

    Only the corners of a tile are touched: left of ``high`` and right of ``low`` every query sees every key.
    The corners are added, not filled in: masked_fill_ takes several times as long (torch 2.13).
    """
    low, high = tile.segment.low, tile.segment.high
    rows = tile.q1 - tile.q0
    if high is not None:
        start = tile.q0 + high + 1  # the first key that the first query does not see
        width = tile.k1 - start
        if width > 0:
            scores[..., start - tile.k0 :].add_(_corner(rows, scores.dtype)[:, None, :width])
    if low is not None:
        skip = max(0, -(tile.q0 + low))  # the first queries, which see their keys from the very first
        width = tile.q1 - 1 + low - tile.k0
        if width > 0:
            corner = _corner(rows, scores.dtype).mT[: rows - skip, :width]
            # the diagonal itself is visible here: the transposed corner begins one row further down
            scores[:, skip + 1 :, :, :width].add_(corner[: rows - skip - 1, None])


@lru_cache_tensors(maxsize=8)
def _corner(rows: int, dtype: torch.dtype) -> Tensor:
    """``[rows, rows]``: -inf on and right of the diagonal, else 0."""
    return torch.full((rows, rows), float("-inf"), dtype=dtype, device="cpu").triu_()


def _forbid_masked(scores: Tensor, tile: _Tile, case: Case) -> Tensor:
    """Apply the mask to one tile; return ``[heads, queries · r, 1]``, 0 where a query sees no key.

    The least finite number instead of -inf: softmax of nothing but -inf is nan.
    """
    least = torch.finfo(scores.dtype).min
    batch, first = divmod(tile.h0, case.key_heads)
    mask = case.mask[min(batch, case.mask.size(0) - 1)]  # [n or 1, sq or 1, sk or 1]
    if mask.size(0) > 1:
        mask = mask.unflatten(0, (case.key_heads, tile.repeats))[first : first + tile.h1 - tile.h0]
    else:
        mask = mask[:, None]
    if mask.size(2) > 1:
        mask = mask[:, :, tile.q0 : tile.q1]
    if mask.size(3) > 1:
        mask = mask[..., tile.k0 : tile.k1]
    # added, not filled in, for speed; |score| is lost in the sum, which is `least` exactly (or -inf before)
    scores.unflatten(1, (-1, tile.repeats)).add_(mask.transpose(1, 2).to(scores.dtype).mul_(least))
    return (scores.amax(-1, keepdim=True) > least).to(scores.dtype)


# -- memory and precision ---------------------------------------------------------------------------


def _grouped(tensor: Tensor, case: Case, heads: int) -> Tensor:
    """Return ``[b · key heads, s, r, d]``, contiguous, in fp32 (fp64 stays fp64)."""
    bnsd = to_bnsd(tensor, case.layout, heads)
    grouped = bnsd.unflatten(1, (case.key_heads, -1)).transpose(2, 3)
    precise = torch.promote_types(tensor.dtype, torch.float32)
    return grouped.to(precise, memory_format=torch.contiguous_format).contiguous().flatten(0, 1)


def _ungrouped(grouped: Tensor, case: Case, dtype: torch.dtype) -> Tensor:
    """Undo ``_grouped``: contiguous in the layout of the call."""
    bnsd = grouped.unflatten(0, (-1, case.key_heads)).transpose(2, 3).flatten(1, 2)
    return from_bnsd(bnsd, case.layout).to(dtype, memory_format=torch.contiguous_format).contiguous()


@contextlib.contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """Let oneDNN round the factors of fp32 matrix products to bf16 where the call's tensors are bf16.

    Queries, keys and values lose nothing by it, weights are rounded as in any bf16 kernel, sums and softmax
    stay fp32; on a processor with AMX or AVX512-BF16 the products take half the time. The switch is the
    process's, hence off again at once; where torch has none the products stay fp32.
    """
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    if dtype is not torch.bfloat16 or switch is None:
        yield
        return
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
