"""Attention over a block of the keys, and its gradients, written out in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.attention.block.heads import heads_first, heads_third, regroup, ungroup
from megatron_npu.ops.dispatch import Operation

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


class Residuals(NamedTuple):
    """What the backward of one block needs of the forward.

    Attributes:
        query: ``[sq, b, n, d]``; fp32, bf16 or fp16.
        key: ``[sk, b, g, d]``, where g divides n.
        value: as ``key``.
        output: the attention over all keys, not over this block alone, ``[sq, b, n, d]``.
        lse: of the scores of all keys, ``[b, n, sq]``, in fp32.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor


def unfused(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention over these keys alone, and the logarithm of what its weights were divided by.

    Args:
        query: ``[sq, b, n, d]``; fp32, bf16 or fp16.
        key: ``[sk, b, g, d]``, where g divides n.
        value: as ``key``.
        scale: factor of the scores.
        causal: query i sees the keys up to i; then sq = sk.

    Returns:
        Output ``[sq, b, n, d]``, contiguous, in the dtype of ``query``, and lse, ``[b, n, sq]`` in fp32.
    """
    query, key, value = ungroup(query, key, value)
    scores = _scores(query, key, scale, causal)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
    return heads_third(weights @ value).contiguous(), lse


def unfused_backward(grad: Tensor, residuals: Residuals, scale: float, causal: bool) -> Gradients:
    """Return what these keys contribute to the gradient of the queries, and their own gradients.

    Dao et al. 2022, FlashAttention, appendix B.

    Args:
        grad: gradient of the attention over all keys, ``[sq, b, n, d]``.
        residuals: the queries, this block of keys and values, and the result over all keys.
        scale: as in the forward, like ``causal``.
        causal: see ``scale``.

    Returns:
        Gradients of query, key and value, like these.
    """
    lse = residuals.lse
    query, key, value = (t.to(lse.dtype) for t in ungroup(*residuals[:3]))
    grad, output = (heads_first(t).to(lse.dtype) for t in (grad, residuals.output))
    weights = (_scores(query, key, scale, causal) - lse.unsqueeze(-1)).exp()
    inner = (grad * output).sum(-1, keepdim=True)
    scores = weights * (grad @ value.transpose(-1, -2) - inner) * scale
    grads = scores @ key, scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
    return regroup(grads, residuals.key.size(2), query.dtype)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """``[b, n, sq, d]`` and ``[b, n, sk, d]`` to ``[b, n, sq, sk]`` in fp32 or better."""
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if not causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))


attention_block = Operation("attention_part", unfused, group="attention")
attention_block_backward = Operation("attention_part_backward", unfused_backward, group="attention")
