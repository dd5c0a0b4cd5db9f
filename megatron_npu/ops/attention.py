"""Attention: softmax(q·kᵀ·scale + mask)·v, one meaning for every layout and mask."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.dispatch import Operation

# Where the dimensions of [b, n, s, d] lie in each four-dimensional layout.
_TO_BNSD = {"SBND": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
_FROM_BNSD = {"SBND": (2, 0, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
_HEADLESS = {"SBH": "SBND", "BSH": "BSND"}

Window = tuple[int | None, int | None]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    scale: float,
    num_heads: int | None = None,
    causal: bool = False,
    window: Window = (None, None),
    offset: int = 0,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return the attention of ``query`` over ``key`` and ``value`` in the layout of ``query``.

    Query i stands at position ``offset + i``; it sees key j unless one of these forbids it:
    ``causal`` (j > position), ``window`` (pre, next) (j < position - pre or j > position + next; None
    does not limit), ``mask`` (True at [i, j]).

    Args:
        query: ``[s, b, h]`` (SBH), ``[b, s, h]`` (BSH), ``[s, b, n, d]`` (SBND), ``[b, s, n, d]`` (BSND) or
            ``[b, n, s, d]`` (BNSD); fp32, bf16 or fp16.
        key: the same layout; its number of heads divides the query's (grouped-query attention).
        value: like ``key``.
        layout: one of the names above.
        scale: factor of the scores, usually 1 / sqrt(d).
        num_heads: heads of the query; required for SBH and BSH, whose last dimension is n * d.
        causal: no key after the query's own position.
        window: how far a query sees back and ahead, in tokens.
        offset: position of the first query among the keys (keys in a cache, context parallelism).
        mask: boolean, broadcastable to ``[b, n, sq, sk]``; True means masked (Megatron's convention).
        dropout_p: probability that an attention weight is dropped, drawn from the device's generator.

    Raises:
        ValueError: an unknown layout, or a head count that is missing or does not divide.

    Softmax is computed in fp32. A query that sees no key gets zeros. Source: Vaswani et al. 2017; mask
    semantics of Megatron-LM and of torch_npu's ``npu_fusion_attention``.
    """
    if layout in _HEADLESS:
        if not num_heads or query.size(-1) % num_heads:
            raise ValueError(f"layout {layout} needs num_heads dividing {query.size(-1)}, given {num_heads}")
        size = query.size(-1) // num_heads
        query, key, value = (t.unflatten(-1, (-1, size)) for t in (query, key, value))
        return attention(
            query,
            key,
            value,
            layout=_HEADLESS[layout],
            scale=scale,
            causal=causal,
            window=window,
            offset=offset,
            mask=mask,
            dropout_p=dropout_p,
        ).flatten(-2)
    if layout not in _TO_BNSD:
        raise ValueError(f"layout must be one of {sorted({*_TO_BNSD, *_HEADLESS})}, given {layout!r}")
    query, key, value = (t.permute(_TO_BNSD[layout]) for t in (query, key, value))
    if query.size(1) % key.size(1):
        raise ValueError(f"{key.size(1)} key heads do not divide {query.size(1)} query heads")
    window = _effective_window(query.size(2), key.size(2), causal, window, offset)
    output = _attention(query, key, value, scale, causal, window, offset, mask, dropout_p)
    return output.permute(_FROM_BNSD[layout])


def _effective_window(queries: int, keys: int, causal: bool, window: Window, offset: int) -> Window:
    """Drop the limits of a window that forbid nothing in this call, so that the fast path is taken."""
    pre, after = window
    if pre is not None and pre >= offset + queries - 1:
        pre = None
    if after is not None and ((causal and after >= 0) or after >= keys - 1 - offset):
        after = None
    return pre, after


def forbidden_pairs(
    queries: int, keys: int, causal: bool, window: Window, offset: int, device: torch.device
) -> Tensor | None:
    """Return ``[queries, keys]``, True where positions alone forbid a pair; None if they forbid none."""
    pre, after = window
    if not causal and pre is None and after is None:
        return None
    return _forbidden_pairs(queries, keys, causal, pre, after, offset, device)


@lru_cache(maxsize=8)  # the same few shapes come back at every layer of every step
def _forbidden_pairs(
    queries: int,
    keys: int,
    causal: bool,
    pre: int | None,
    after: int | None,
    offset: int,
    device: torch.device,
) -> Tensor:
    distance = torch.arange(offset, offset + queries, device=device)[:, None] - torch.arange(
        keys, device=device
    )
    forbidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        forbidden |= distance < 0
    if pre is not None:
        forbidden |= distance > pre
    if after is not None:
        forbidden |= -distance > after
    return forbidden


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    window: Window,
    offset: int,
    mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attention written out; scores and softmax in fp32 (fp64 stays fp64). ``[b, n, s, d]`` throughout."""
    groups = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(precise) * scale
    forbidden = forbidden_pairs(query.size(2), key.size(2), causal, window, offset, query.device)
    if mask is not None:
        forbidden = mask if forbidden is None else mask | forbidden
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, float("-inf"))
        blind = forbidden.expand_as(scores).all(-1, keepdim=True)
        # softmax of nothing but -inf is nan, in its gradient too: give such rows zeros instead
        scores = scores.masked_fill(blind, 0.0)
    weights = scores.softmax(-1)
    if forbidden is not None:
        weights = weights.masked_fill(blind, 0.0)
    weights = F.dropout(weights.to(query.dtype), dropout_p)
    return weights @ value


_attention = Operation("attention", _reference)


@_attention.on("cpu", "cuda")
def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    window: Window,
    offset: int,
    mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """torch's fused kernels; a mask is only built where the plain causal triangle does not say it all."""
    plain_causal = causal and window == (None, None) and mask is None and (offset == 0 or query.size(2) == 1)
    allowed: Tensor | None = None
    if plain_causal and query.size(2) == 1 and key.size(2) == offset + 1:
        plain_causal = False  # one query at the end of its keys sees them all
    elif not plain_causal or query.size(2) != key.size(2):
        plain_causal = False
        forbidden = forbidden_pairs(query.size(2), key.size(2), causal, window, offset, query.device)
        if mask is not None:
            forbidden = mask if forbidden is None else mask | forbidden
        allowed = None if forbidden is None else ~forbidden
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=dropout_p,
        is_causal=plain_causal,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )
