"""Scale, mask and softmax of attention scores: Megatron's FusedScaleMaskSoftmax without its CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -10000.0  # what megatron's attention_mask_func writes; a fully masked row becomes uniform


def scale_mask_softmax(scores: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    """Return ``softmax(scores * scale)`` with masked scores at -10000, as upstream.

    Args:
        scores: ``[b, n, sq, sk]``, fp32, bf16 or fp16.
        mask: boolean, broadcastable to ``scores``, True means masked; or None.
        scale: factor of the scores; None is 1.
        causal: mask keys after the query (top left aligned, sq == sk).

    Returns:
        ``[b, n, sq, sk]`` in the dtype of ``scores``; computed in fp32.
    """
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scale is not None:
        precise = precise * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        mask = future if mask is None else mask | future
    if mask is not None:
        precise = precise.masked_fill(mask, MASKED)
    return precise.softmax(-1).to(scores.dtype)
