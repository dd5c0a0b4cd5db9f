"""Implement flash attention and its gradient as a reference for the kernels in ``attention.py``.

Every layout is split into ``[b, n, s, d]`` pieces: one piece for a dense layout, one per sequence for TND.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_npu.sim.kernels import randomness
from megatron_npu.sim.kernels.attention import layouts
from megatron_npu.sim.kernels.dropout import unpack_bits

ADD_BEFORE_SCALE = 1  # pse_type, the default: scale · (q·kᵀ + pse); 0 is scale · q·kᵀ + pse


@dataclass(frozen=True)
class Call:
    """Arguments that the forward and backward passes share in all versions of the operation."""

    heads: int
    layout: str
    pse: Tensor | None
    mask: Tensor | None
    scale: float
    keep_prob: float
    before: int
    after: int
    prefix: Sequence[int] | None
    query_ends: Sequence[int] | None
    key_ends: Sequence[int] | None
    mode: int
    softmax_layout: str
    sink: Tensor | None
    pse_type: int = ADD_BEFORE_SCALE

    def kv_heads(self, query: Tensor, key: Tensor, value: Tensor) -> int:
        return layouts.sizes(query, key, value, self.heads, self.layout, self.query_ends).kv_heads


@dataclass(frozen=True)
class Piece:
    """A block of attention, with ``[b, n, s, d]`` tensors and, for layout TND, their rows in the original
    tensors.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_rows: slice
    key_rows: slice
    forbidden: Tensor | None


def pieces(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Piece]:
    """Split an attention call into blocks that do not attend to each other."""
    if call.layout != "TND":
        kv_heads = call.kv_heads(query, key, value)
        dense = (
            layouts.to_bnsd(query, call.layout, call.heads),
            layouts.to_bnsd(key, call.layout, kv_heads),
            layouts.to_bnsd(value, call.layout, kv_heads),
        )
        yield Piece(*dense, slice(None), slice(None), _forbidden(call, dense[0].size(2), dense[1].size(2)))
        return
    query_spans = layouts.spans(call.query_ends or ())
    for index, (rows, columns) in enumerate(
        zip(query_spans, layouts.spans(call.key_ends or ()), strict=True)
    ):
        prefix = None if call.prefix is None else [call.prefix[index]]
        yield Piece(
            _rows(query, rows),
            _rows(key, columns),
            _rows(value, columns),
            rows,
            columns,
            _forbidden(call, rows.stop - rows.start, columns.stop - columns.start, prefix),
        )


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Return selected rows of ``[t, n, d]`` as a tensor ``[1, n, s, d]``."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _forbidden(call: Call, queries: int, keys: int, prefix: Sequence[int] | None = None) -> Tensor | None:
    chosen = call.prefix if prefix is None else prefix
    return layouts.forbidden(call.mode, queries, keys, call.mask, call.before, call.after, chosen)


def _scores(call: Call, piece: Piece) -> Tensor:
    """Return ``scale · q·kᵀ`` after applying the position bias and the mask, as fp32 ``[b, n, sq, skv]``."""
    groups = piece.query.size(1) // piece.key.size(1)
    scores = piece.query.float() @ piece.key.float().repeat_interleave(groups, 1).transpose(-1, -2)
    pse = 0.0 if call.pse is None else call.pse.float()
    scores = (scores + pse) * call.scale if call.pse_type == ADD_BEFORE_SCALE else scores * call.scale + pse
    return scores if piece.forbidden is None else scores.masked_fill(piece.forbidden, float("-inf"))


def _weights(piece: Piece) -> int:
    """Return the number of attention weights in a block."""
    return piece.query.shape[:3].numel() * piece.key.size(2)


def _dropout(
    call: Call, blocks: Sequence[Piece], seed: int, offset: int, packed: Tensor | None = None
) -> list[Tensor | None]:
    """Return the dropout factors (0 or 1 / keep_prob) of every block as flat tensors, or None without
    dropout.

    The factors are slices of one mask, which is generated from the seed and offset unless ``packed`` contains
    its bits. The pieces therefore have different masks, and the backward pass obtains the same masks.
    """
    if call.keep_prob == 1:
        return [None] * len(blocks)
    counts = [_weights(block) for block in blocks]
    if packed is not None:
        kept = unpack_bits(packed.flatten(), sum(counts))
    else:
        kept = randomness.kept(seed, offset, sum(counts), call.keep_prob)
    return list((kept / call.keep_prob).split(counts))


def forward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: int, offset: int
) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    """Return the output, the softmax maximum and sum, and the seed, offset and length of the dropout mask.

    Args:
        mask: the packed dropout mask; ``seed`` and ``offset`` then tell the backward pass how to regenerate
            it. Without it, they are drawn from the device's generator regardless of the arguments, as on the
            device.
    """
    blocks = list(pieces(call, query, key, value))
    if call.keep_prob < 1 and mask is None:
        seed, offset = randomness.advance()
    kept = _dropout(call, blocks, seed, offset, mask)
    results = [_forward_piece(call, *each) for each in zip(blocks, kept, strict=True)]
    outputs, maxima, sums = zip(*results, strict=True)
    drawn = seed, offset, sum(_weights(block) for block in blocks)
    if call.layout != "TND":
        return layouts.from_bnsd(outputs[0], call.layout), maxima[0], sums[0], *drawn
    joined = query.new_zeros(*query.shape[:2], value.size(2))
    for block, output in zip(blocks, outputs, strict=True):
        joined[block.query_rows] = output[0].transpose(0, 1)
    maximum, total = (
        _padded(layouts.pack_statistics([x[0] for x in each], call.softmax_layout), query.size(0))
        for each in (maxima, sums)
    )
    return joined, maximum, total, *drawn


def _padded(statistics: Tensor, rows: int) -> Tensor:
    """Append zeros to represent the rows of omitted sequences."""
    missing = statistics.new_zeros(rows - statistics.size(0), *statistics.shape[1:])
    return torch.cat([statistics, missing])


def _forward_piece(call: Call, piece: Piece, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(call, piece)
    maximum = scores.amax(-1, keepdim=True) if scores.size(-1) else scores.new_zeros(*scores.shape[:-1], 1)
    if call.sink is not None:
        maximum = maximum.maximum(call.sink.view(1, -1, 1, 1))
    maximum = maximum.masked_fill(maximum.isinf(), 0.0)  # a query that sees no key: weights 0, output 0
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    if call.sink is not None:
        total = total + torch.exp(call.sink.view(1, -1, 1, 1) - maximum)
    weights = weights / total.masked_fill(total == 0, 1.0)
    if kept is not None:
        weights = weights * kept.view_as(weights)
    groups = piece.query.size(1) // piece.key.size(1)
    output = weights @ piece.value.float().repeat_interleave(groups, 1)
    wide = (*maximum.shape[:-1], layouts.STATISTICS_WIDTH)
    return output.to(piece.query.dtype), maximum.expand(wide).contiguous(), total.expand(wide).contiguous()


@dataclass(frozen=True)
class Saved:
    """Values that the forward pass saves for the backward pass."""

    maximum: Tensor
    total: Tensor
    output: Tensor
    seed: int
    offset: int


@dataclass
class Gradients:
    """Gradients of query, key and value and, if given, of position bias and sink."""

    query: Tensor
    key: Tensor
    value: Tensor
    pse: Tensor | None = None
    sink: Tensor | None = None


def backward(call: Call, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, saved: Saved) -> Gradients:
    """Return the gradients, computed from the saved statistics and output, as the device does."""
    gradients = Gradients(torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value))
    blocks = list(pieces(call, query, key, value))
    kept = _dropout(call, blocks, saved.seed, saved.offset)
    for piece, factor, maximum, total in zip(blocks, kept, *_statistics(call, blocks, saved), strict=True):
        part, output = (_as_piece(call, x, piece) for x in (dy, saved.output))
        dq, dk, dv, dscores, dsink = _backward_piece(call, piece, maximum, total, part, output, factor)
        _store(call, gradients, piece, dq, dk, dv)
        if call.pse is not None:
            gradients.pse = dscores.sum_to_size(call.pse.shape).to(call.pse.dtype)
        if dsink is not None:
            gradients.sink = dsink if gradients.sink is None else gradients.sink + dsink
    return gradients


def _statistics(call: Call, blocks: Sequence[Piece], saved: Saved) -> tuple[list[Tensor], list[Tensor]]:
    """Return the softmax maximum and the softmax sum, ``[b, n, s, 1]``, of every block."""
    if call.layout != "TND":
        return [saved.maximum[..., :1]], [saved.total[..., :1]]
    rows = [block.query_rows for block in blocks]
    maximum, total = (
        [part[..., :1].unsqueeze(0) for part in layouts.unpack_statistics(x, rows, call.softmax_layout)]
        for x in (saved.maximum, saved.total)
    )
    return maximum, total


def _as_piece(call: Call, x: Tensor, piece: Piece) -> Tensor:
    """Return this block's part of a tensor that has the output's layout, as fp32 ``[b, n, s, d]``."""
    if call.layout == "TND":
        return _rows(x, piece.query_rows).float()
    return layouts.to_bnsd(x, call.layout, call.heads).float()


def _store(call: Call, gradients: Gradients, piece: Piece, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write the gradients of one block into the gradients of the whole tensors."""
    if call.layout == "TND":
        for target, rows, grad in (
            (gradients.query, piece.query_rows, dq),
            (gradients.key, piece.key_rows, dk),
            (gradients.value, piece.key_rows, dv),
        ):
            target[rows] = grad[0].transpose(0, 1).to(target.dtype)
        return
    for target, grad in ((gradients.query, dq), (gradients.key, dk), (gradients.value, dv)):
        target.copy_(layouts.from_bnsd(grad, call.layout))


def _backward_piece(
    call: Call,
    piece: Piece,
    maximum: Tensor,
    total: Tensor,
    dy: Tensor,
    output: Tensor,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return one block's gradients of query, key and value, ``[b, n, s, d]``, of the position bias and of
    the sink.
    """
    groups = piece.query.size(1) // piece.key.size(1)
    key, value = (x.float().repeat_interleave(groups, 1) for x in (piece.key, piece.value))
    divisor = total.masked_fill(total == 0, 1.0)
    weights = torch.exp(_scores(call, piece) - maximum) / divisor
    dweights = dy @ value.transpose(-1, -2)
    dropped = weights
    if kept is not None:
        dweights = dweights * kept.view_as(weights)
        dropped = weights * kept.view_as(weights)
    projection = (output * dy).sum(-1, keepdim=True)
    dscores = weights * (dweights - projection)
    dq = dscores @ key * call.scale
    dk = _sum_groups(dscores.transpose(-1, -2) @ piece.query.float() * call.scale, groups)
    dv = _sum_groups(dropped.transpose(-1, -2) @ dy, groups)
    dsink = None
    if call.sink is not None:
        sink_weight = torch.exp(call.sink.view(1, -1, 1, 1) - maximum) / divisor
        dsink = -(sink_weight * projection).sum((0, 2, 3))
    return dq, dk, dv, dscores * (call.scale if call.pse_type == ADD_BEFORE_SCALE else 1), dsink


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum a tensor ``[b, n, s, d]`` over the heads that share a key head."""
    return x.unflatten(1, (-1, groups)).sum(2)
