"""Scale and mask attention scores and compute their softmax, like Megatron's FusedScaleMaskSoftmax, in
plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.ops.dispatch import Make, Operation, unsupported_dtype

MASKED = -10000.0  # what megatron's attention_mask_func writes; a fully masked row becomes uniform


def scale_mask_softmax(scores: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    """Return ``softmax(scores * scale)``, leaving out masked scores.

    Masked scores are set to -10000, as in upstream.

    Args:
        scores: ``[b, n, sq, sk]``, fp32, bf16 or fp16.
        mask: a boolean mask, broadcastable to ``scores``, True where masked; or None.
        scale: the factor of the scores; None means 1.
        causal: whether to mask keys after the query (top left aligned, sq == sk).

    Returns:
        ``[b, n, sq, sk]`` in the dtype of ``scores``; computed in fp32. A fully masked row is uniform, and no
        gradient flows through masked scores.

    Source: the torch path of ``FusedScaleMaskSoftmax`` with ``attention_softmax_in_fp32``.
    """
    return _scale_mask_softmax(scores, mask, 1.0 if scale is None else float(scale), causal)


@lru_cache_tensors(maxsize=4)  # the same shape comes back at every layer of every step
def future_keys(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask ``[1, 1, queries, keys]`` that is True where the key is later than the query."""
    return torch.ones((1, 1, queries, keys), dtype=torch.bool, device=device).triu_(1)


def _whole_mask(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    if not causal:
        return mask
    future = future_keys(scores.size(-2), scores.size(-1), scores.device)
    return future if mask is None else mask | future


def _reference(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    mask = _whole_mask(scores, mask, causal)
    if mask is not None:
        precise = precise.masked_fill(mask, MASKED)
    return precise.softmax(-1).to(scores.dtype)


_scale_mask_softmax = Operation("scale_mask_softmax", _reference, group="softmax")


class _ScaleMaskSoftmax(torch.autograd.Function):
    """Compute a masked softmax that saves only the probabilities, in the dtype of the scores, for the
    backward pass.

    Autograd would also save them in fp32.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        if causal and mask is None:  # no row is fully masked, so that 0 and -inf say it in one pass
            precise = torch.add(_future_shift(scores), scores, alpha=scale)
        else:
            mask = _whole_mask(scores, mask, causal)
            precise = torch.mul(scores.to(torch.promote_types(scores.dtype, torch.float32)), scale)
            if mask is not None:
                precise.masked_fill_(mask, MASKED)
        probabilities = precise.softmax(-1).to(scores.dtype)
        ctx.save_for_backward(probabilities, mask)
        ctx.scale = scale
        return probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, mask = ctx.saved_tensors
        result = torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype).mul_(ctx.scale)
        if mask is not None:
            result.masked_fill_(mask, 0.0)  # matters in fully masked rows, which are uniform and not zero
        return result, None, None, None


def _future_shift(scores: Tensor) -> Tensor:
    precise = torch.promote_types(scores.dtype, torch.float32)
    return _shift(scores.size(-2), scores.size(-1), scores.device, precise)


@lru_cache_tensors(maxsize=2)  # 64 MiB each at 4,096 tokens
def _shift(queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a mask ``[1, 1, queries, keys]`` that is -inf where the key is later than the query, and 0
    elsewhere.
    """
    return torch.full((1, 1, queries, keys), float("-inf"), dtype=dtype, device=device).triu_(1)


_scale_mask_softmax.on("cpu", "cuda", note="in place; only the result is kept")(_ScaleMaskSoftmax.apply)


def _beyond_npu(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> str | None:
    """Return the limit of ``npu_scaled_masked_softmax`` (torch_npu 2.13) that the arguments exceed, or
    None.
    """
    if scores.dim() != 4:
        return f"npu_scaled_masked_softmax supports only 4 dimensions, but got {scores.dim()}"
    for name, size in (("queries", scores.size(2)), ("keys", scores.size(3))):
        if not 32 <= size <= 4096 or size % 32:
            return (
                f"npu_scaled_masked_softmax supports only 32 to 4096 {name} in multiples of 32, but got "
                f"{size}"
            )
    return unsupported_dtype("npu_scaled_masked_softmax", scores.dtype)


@_scale_mask_softmax.on(
    "npu",
    supports=_beyond_npu,
    note="`npu_scaled_masked_softmax`",
    limits="queries and keys 32 to 4096, multiples of 32",
)
def _npu(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    import torch_npu

    mask = _whole_mask(scores, mask, causal)
    if mask is None:  # the kernel has no case without a mask
        mask = _nothing_masked(scores.size(-2), scores.size(-1), scores.device)
    return torch_npu.npu_scaled_masked_softmax(scores, mask, scale, False)


@lru_cache_tensors(maxsize=4)
def _nothing_masked(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.zeros((1, 1, queries, keys), dtype=torch.bool, device=device)


@_scale_mask_softmax.example()
def _example(make: Make) -> Tensor:
    return scale_mask_softmax(make(2, 4, 64, 64), None, 0.5, True)
