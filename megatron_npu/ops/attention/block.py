"""Attention over some of the keys, and its gradients given the result over all of them.

What ring attention is made of: parts over disjoint keys are merged by the logarithm of the sum of their
exponentiated scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.attention import npu
from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd
from megatron_npu.ops.attention.spec import Case, dense_segments
from megatron_npu.ops.dispatch import Operation

_LAYOUT = "SBND"
Parts = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def unfused(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Parts:
    """Return the attention over these keys, and the logarithm of what its weights were divided by.

    Args:
        query: ``[sq, b, n, d]``; fp32, bf16 or fp16.
        key: ``[sk, b, g, d]``, where g divides n.
        value: as ``key``.
        scale: factor of the scores.
        causal: query i sees the keys up to i; then sq = sk.

    Returns:
        Output ``[sq, b, n, d]``, contiguous, in the dtype of ``query``, and ``[b, n, sq]`` in fp32.
    """
    query, key, value = _alike(query, key, value)
    scores = _scores(query, key, scale, causal)
    total = scores.logsumexp(-1)
    weights = (scores - total.unsqueeze(-1)).exp().to(value.dtype)
    return from_bnsd(weights @ value, _LAYOUT).contiguous(), total


def unfused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    """Return the gradients of ``query``, ``key`` and ``value``: what these keys contribute to them.

    Args:
        grad: gradient of the attention over all keys, ``[sq, b, n, d]``.
        query: as in ``unfused``; so are ``key``, ``value``, ``scale`` and ``causal``.
        key: see ``query``.
        value: see ``query``.
        output: the attention over all keys, ``[sq, b, n, d]``.
        total: the logarithm of its divisor, over all keys, ``[b, n, sq]``.
        scale: see ``query``.
        causal: see ``query``.
    """
    groups = key.size(2)
    query, key, value = (t.to(total.dtype) for t in _alike(query, key, value))
    grad, output = (to_bnsd(t, _LAYOUT, t.size(2)).to(total.dtype) for t in (grad, output))
    weights = (_scores(query, key, scale, causal) - total.unsqueeze(-1)).exp()
    inner = (grad * output).sum(-1, keepdim=True)
    scores = weights * (grad @ value.transpose(-1, -2) - inner) * scale
    grads = scores @ key, scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
    return _as_given(grads, groups, query.dtype)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """``[b, n, sq, d]`` and ``[b, n, sk, d]`` to ``[b, n, sq, sk]`` in fp32 or better."""
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if not causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))


partial = Operation("attention_part", unfused, group="attention")
partial_backward = Operation("attention_part_backward", unfused_backward, group="attention")


# -- between [s, b, n, d] with groups, and [b, n, s, d] without ----------------------------------------


def _alike(query: Tensor, key: Tensor, value: Tensor) -> Gradients:
    """Return the three as ``[b, n, s, d]``, keys and values repeated for each head of their group."""
    heads = query.size(2)
    query, key, value = (to_bnsd(t, _LAYOUT, t.size(2)) for t in (query, key, value))
    if key.size(1) != heads:
        key, value = (t.repeat_interleave(heads // t.size(1), dim=1) for t in (key, value))
    return query, key, value


def _as_given(grads: Gradients, groups: int, dtype: torch.dtype) -> Gradients:
    """Undo ``_alike``: the gradients of a group's heads are added up in fp32."""
    query, *others = grads
    if query.size(1) != groups:
        precise = torch.promote_types(dtype, torch.float32)
        others = [t.unflatten(1, (groups, -1)).sum(2, dtype=precise).to(dtype) for t in others]
    query, key, value = (from_bnsd(t, _LAYOUT) for t in (query, *others))
    return query, key, value


# -- cpu ---------------------------------------------------------------------------------------------


@partial.on("cpu")
def _on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Parts:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, total = kernel(*_alike(query, key, value), 0.0, causal, scale=scale)
    return from_bnsd(output, _LAYOUT).contiguous(), total


@partial_backward.on("cpu")
def _backward_on_cpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad, output = (to_bnsd(t, _LAYOUT, t.size(2)) for t in (grad, output))
    grads = kernel(grad, *_alike(query, key, value), output, total, 0.0, causal, scale=scale)
    return _as_given(grads, key.size(2), key.dtype)


# -- npu: npu_fusion_attention returns the largest score and the divisor of each query, eight times ------


def _npu_case(query: Tensor, key: Tensor, scale: float, causal: bool) -> Case:
    segments = dense_segments(query.size(0), key.size(0), causal, (None, None), 0)
    return Case(_LAYOUT, query.size(2), key.size(2), scale, segments)


def _npu_refusal(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> str | None:
    return npu.refusal(query, key, value, _npu_case(query, key, scale, causal))


def _npu_backward_refusal(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, total: Tensor, *how: Any
) -> str | None:
    return _npu_refusal(query, key, value, *how)


@partial.on("npu", supports=_npu_refusal)
def _on_npu(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Parts:
    import torch_npu

    case = _npu_case(query, key, scale, causal)
    call = npu.fitting_call(query, key, value, case)
    output, largest, divisor = torch_npu.npu_fusion_attention(
        *(t.flatten(2) for t in (query, key, value)),
        call.head_num,
        call.input_layout,
        atten_mask=npu.mask_of(call, query, case),
        scale=scale,
        sparse_mode=call.sparse_mode,
    )[:3]
    return output.contiguous().view_as(query), largest[..., 0] + divisor[..., 0].log()


@partial_backward.on("npu", supports=_npu_backward_refusal)
def _backward_on_npu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    import torch_npu

    case = _npu_case(query, key, scale, causal)
    call = npu.fitting_call(query, key, value, case)
    # exp(score - largest) / divisor is all that is made of the two: the logarithm may stand for both
    largest = total.unsqueeze(-1).expand(*total.shape, 8).contiguous()
    grads = torch_npu.npu_fusion_attention_grad(
        *(t.flatten(2) for t in (query, key, value, grad)),
        call.head_num,
        call.input_layout,
        atten_mask=npu.mask_of(call, query, case),
        softmax_max=largest,
        softmax_sum=torch.ones_like(largest),
        attention_in=output.flatten(2),
        scale_value=scale,
        sparse_mode=call.sparse_mode,
    )
    return grads[0].view_as(query), grads[1].view_as(key), grads[2].view_as(value)


# -- cuda: torch's flash kernel; written without a GPU at hand ----------------------------------------


def _cuda_refusal(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> str | None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype}: torch's flash kernel has fp16 and bf16"
    sizes = {t.size(3) for t in (query, key, value)}
    if len(sizes) > 1 or query.size(3) % 8 or query.size(3) > 256:
        return f"head sizes {sorted(sizes)}: torch's flash kernel has one size, a multiple of 8 up to 256"
    return None


def _cuda_backward_refusal(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, total: Tensor, *how: Any
) -> str | None:
    return _cuda_refusal(query, key, value, *how)


@partial.on("cuda", supports=_cuda_refusal)
def _on_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Parts:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output, total = kernel(*_alike(query, key, value), 0.0, causal, False, scale=scale)[:2]
    return from_bnsd(output, _LAYOUT).contiguous(), total


@partial_backward.on("cuda", supports=_cuda_backward_refusal)
def _backward_on_cuda(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    grad, output = (to_bnsd(t, _LAYOUT, t.size(2)) for t in (grad, output))
    lengths = None, None, query.size(0), key.size(0)  # None: not packed
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of the dropout, of which there is none
    grads = kernel(
        grad, *_alike(query, key, value), output, total, *lengths, 0.0, causal, seed, seed, scale=scale
    )
    return _as_given(grads, key.size(2), key.dtype)
