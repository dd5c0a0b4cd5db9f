"""Attention in fp64, written for reading and shared with nothing that it tests."""

from __future__ import annotations

import torch

LAYOUTS = ("SBH", "BSH", "SBND", "BSND", "BNSD")
_ORDER = {"BNSD": (0, 1, 2, 3), "SBND": (2, 0, 1, 3), "BSND": (0, 2, 1, 3)}


def in_layout(tensor, layout, heads=None, back=False):
    """Bring ``[b, n, s, d]`` into ``layout``, or back."""
    order = _ORDER[{"SBH": "SBND", "BSH": "BSND"}.get(layout, layout)]
    flat = layout in ("SBH", "BSH")
    if back:
        tensor = tensor.unflatten(-1, (heads, -1)) if flat else tensor
        return tensor.permute([order.index(i) for i in range(4)])
    tensor = tensor.permute(order)
    return tensor.flatten(-2) if flat else tensor


def visible(queries, keys, causal, window, offset):
    """Return ``[queries, keys]``: whether position allows the pair."""
    position = offset + torch.arange(queries)[:, None]
    key = torch.arange(keys)[None]
    pairs = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        pairs &= key <= position
    if window[0] is not None:
        pairs &= key >= position - window[0]
    if window[1] is not None:
        pairs &= key <= position + window[1]
    return pairs


def formula(query, key, value, scale, pairs):
    """softmax(q·kᵀ·scale) over the visible pairs, times v; ``[b, n, s, d]``; no visible key gives zero."""
    repeat = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(repeat, 1) for t in (key, value))
    scores = torch.einsum("bnid,bnjd->bnij", query, key) * scale
    weights = torch.where(pairs, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bnij,bnjd->bnid", weights / torch.where(total == 0, 1.0, total), value)


def packed_formula(query, key, value, scale, packed, causal, window, offset):
    """The same for ``[t, n, d]``: every sequence on its own."""
    outputs, q, k = [], 0, 0
    for queries, keys in zip(packed.query_lengths, packed.key_lengths, strict=True):
        position = keys - queries if offset == "end" else offset
        parts = (query[q : q + queries], key[k : k + keys], value[k : k + keys])
        dense = (t.transpose(0, 1)[None] for t in parts)
        pairs = visible(queries, keys, causal, window, position)
        outputs.append(formula(*dense, scale, pairs)[0].transpose(0, 1))
        q, k = q + queries, k + keys
    return torch.cat(outputs)
