"""Compute attention over one block of the keys, and its gradients, in plain torch as the reference.

A block is an ``AttentionSpec`` in layout SBND without a mask. Its segments are contiguous and cover all
queries and keys, and every query in them sees at least one key. If there are several segments, they are
packed sequences in a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.attention.block.heads import heads_first, heads_third, regroup, ungroup
from megatron_npu.ops.attention.block.tiles import row_tiles
from megatron_npu.ops.attention.spec import AttentionSpec, Segment, forbidden_pairs
from megatron_npu.ops.dispatch import Operation

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value
Drawn = tuple[int, ...]  # what a device finds the mask of dropout again by; empty without


class Residuals(NamedTuple):
    """The tensors that the backward pass of one attention block needs from the forward pass.

    Attributes:
        query: ``[sq, b, n, d]``; fp32, bf16 or fp16.
        key: ``[sk, b, g, d]``, where g divides n.
        value: like ``key``.
        output: the attention over all keys, not only over this block, ``[sq, b, n, d]``.
        lse: log-sum-exp of the scores of all keys, ``[b, n, sq]``, in fp32.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor


def unfused(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Drawn]:
    """Return the attention over the keys of one block, and the log-sum-exp (lse) of the scores.

    Args:
        query: ``[sq, b, n, d]``; fp32, bf16 or fp16.
        key: ``[sk, b, g, d]``, where g divides n.
        value: like ``key``.
        spec: the block; dropout is applied to the normalized weights.

    Returns:
        Output ``[sq, b, n, d]``, contiguous, in the dtype of ``query``; lse ``[b, n, sq]`` in fp32, of the
        scores before dropout; and the value to pass to the backward pass as ``drawn``.
    """
    query, key, value = ungroup(query, key, value)
    output = query.new_zeros(*query.shape[:3], value.size(3))
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    drawn = _draw(query.device) if spec.dropout_p else ()
    for tile, kept in _tiles(query, spec, drawn):
        rows, columns = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        scores = _scores(query[:, :, rows], key[:, :, columns], spec.scale, tile)
        lse[:, :, rows] = total = scores.logsumexp(-1)
        weights = (scores - total.unsqueeze(-1)).exp()
        weights = weights if kept is None else weights * kept
        output[:, :, rows] = weights.to(value.dtype) @ value[:, :, columns]
    return heads_third(output).contiguous(), lse, drawn


def unfused_backward(grad: Tensor, residuals: Residuals, spec: AttentionSpec, drawn: Drawn) -> Gradients:
    """Return how one block of keys contributes to the queries' gradient, and the gradients of its keys and
    values.

    Source: Dao et al. 2022, FlashAttention, appendix B.

    Args:
        grad: the gradient of the attention over all keys, ``[sq, b, n, d]``.
        residuals: the queries, this block's keys and values, and the result over all keys.
        spec: the block, as passed to the forward pass.
        drawn: the third result of this block's forward pass.

    Returns:
        The gradients of query, key and value, with their shapes and dtypes.
    """
    precise = residuals.lse.dtype
    query, key, value = (t.to(precise) for t in ungroup(*residuals[:3]))
    grad, output = (heads_first(t).to(precise) for t in (grad, residuals.output))
    inner = (grad * output).sum(-1, keepdim=True)  # over all keys: it holds with dropout, too
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for tile, kept in _tiles(query, spec, drawn):
        rows, columns = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        q, k, v, g = query[:, :, rows], key[:, :, columns], value[:, :, columns], grad[:, :, rows]
        weights = (_scores(q, k, spec.scale, tile) - residuals.lse[:, :, rows].unsqueeze(-1)).exp()
        of_weights = g @ v.mT
        dropped, of_weights = (weights, of_weights) if kept is None else (weights * kept, of_weights * kept)
        scores = weights * (of_weights - inner[:, :, rows]) * spec.scale
        grads[0][:, :, rows] = scores @ k
        grads[1][:, :, columns] += scores.mT @ q
        grads[2][:, :, columns] += dropped.mT @ g
    return regroup(grads, residuals.key.size(2), residuals.query.dtype)


def _draw(device: torch.device) -> Drawn:
    """Draw a seed for dropout from the device's random generator.

    A recomputation draws the same seed.
    """
    return (int(torch.randint(2**62, (), device=device)),)


def _tiles(query: Tensor, spec: AttentionSpec, drawn: Drawn) -> Iterator[tuple[Segment, Tensor | None]]:
    """Yield the tiles of a block of keys with dropout factors ``[b, n, sq, sk]``, each 0 or 1 / (keep
    probability).
    """
    generator = torch.Generator(query.device).manual_seed(drawn[0]) if drawn else None
    keep = 1.0 - spec.dropout_p
    for tile in (tile for segment in spec.segments for tile in row_tiles(segment)):
        if generator is None:
            yield tile, None
            continue
        shape = (*query.shape[:2], tile.q1 - tile.q0, tile.k1 - tile.k0)
        draws = torch.rand(shape, generator=generator, dtype=torch.float32, device=query.device)
        yield tile, (draws < keep).to(torch.promote_types(query.dtype, torch.float32)).div_(keep)


def _scores(query: Tensor, key: Tensor, scale: float, tile: Segment) -> Tensor:
    """Return the attention scores ``[b, n, sq, sk]`` of queries and keys ``[b, n, s, d]``, in fp32 or
    higher precision.
    """
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    forbidden = forbidden_pairs(tile, query.device)
    return scores if forbidden is None else scores.masked_fill(forbidden, float("-inf"))


def _draws(*arguments: object) -> bool:
    return any(isinstance(each, AttentionSpec) and each.dropout_p > 0.0 for each in arguments)


attention_block = Operation("attention_part", unfused, group="attention", draws=_draws)
attention_block_backward = Operation(
    "attention_part_backward", unfused_backward, group="attention", draws=_draws
)
