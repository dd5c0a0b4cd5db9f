"""Fuse the output layer with cross-entropy, so that the full logits are never stored in memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.ops.dispatch import Make, Operation
from megatron_npu.ops.linear_cross_entropy import blocks, kept, npu
from megatron_npu.ops.linear_cross_entropy.part import Part
from megatron_npu.ops.linear_cross_entropy.reference import reference


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    main_grad: Tensor | None = None,
    recompute: bool = True,
) -> Tensor:
    """Return the loss ``logsumexp(z) - z[target]`` of each token, where ``z = hidden · weightᵀ + bias``.

    Args:
        hidden: ``[..., h]``, fp32, bf16 or fp16.
        weight: ``[v, h]``, this rank's part of the vocabulary, of the dtype of ``hidden``.
        target: ``[...]``, token ids of the whole vocabulary. An id outside it counts as a logit of 0.
        bias: ``[v]``, of the dtype of ``hidden``, or None.
        vocab_start: the id of the first token of this rank's part.
        group: the tensor-parallel group. If it is None or a group of one, ``weight`` covers the whole
            vocabulary.
        main_grad: ``[v, h]``, a buffer to which the weight's gradient is added block by block; the weight
            itself then gets no gradient. If None, the weight gets a gradient in its own dtype.
        recompute: whether backward recomputes the logits. If True, nothing of their size is saved, at the
            cost of a third more matmuls. If False, the exponentials are saved on a cpu, in the dtype and size
            of the logits, which is faster; other devices recompute anyway.

    Returns:
        ``[...]``, fp32. Sums over the vocabulary and over blocks are fp32. The gradient of ``hidden`` is this
        rank's share; the caller sums it over ``group``, as Megatron's mappings do.

    Sources: blocks of the vocabulary with one running normalizer as in Wijmans et al., Cut Your Losses in
    Large-Vocabulary Language Models (2024); the collectives as in Megatron-LM's vocabulary-parallel loss.
    """
    return _linear_cross_entropy(hidden, weight, bias, target, Part(vocab_start, group, main_grad), recompute)


_linear_cross_entropy = Operation(
    "linear_cross_entropy", reference, group="cross_entropy", rounds_within=True
)


@_linear_cross_entropy.on("cpu", note="blocks of the vocabulary; keeps the exponentials by default")
def _cpu(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part, recompute: bool
) -> Tensor:
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    # fp16 has no room for exponentials that are not normalized yet
    way = blocks if recompute or not learns or hidden.dtype is torch.float16 else kept
    return way.LinearCrossEntropy.apply(hidden, weight, bias, target, part)


@_linear_cross_entropy.on("cuda", note="blocks of the vocabulary, recomputed in backward")
def _in_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part, recompute: bool
) -> Tensor:
    return blocks.LinearCrossEntropy.apply(hidden, weight, bias, target, part)


@_linear_cross_entropy.on(
    "npu", note="`npu_fused_linear_online_max_sum` and related operations; fp32 in blocks, as on cuda"
)
def _npu(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part, recompute: bool
) -> Tensor:
    if bias is not None or npu.beyond_kernels(hidden, weight):  # the kernels add no bias
        return blocks.LinearCrossEntropy.apply(hidden, weight, bias, target, part)
    return npu.LinearCrossEntropy.apply(hidden, weight, target, part)


@_linear_cross_entropy.example()
def _example(make: Make) -> Tensor:
    hidden, weight = make(32, 2, 64), make(500, 64)
    return linear_cross_entropy(hidden, weight, _targets(hidden))


@_linear_cross_entropy.example("keeping the exponentials")
def _kept_example(make: Make) -> Tensor:
    hidden, weight = make(32, 2, 64), make(500, 64)
    return linear_cross_entropy(hidden, weight, _targets(hidden), recompute=False)


@_linear_cross_entropy.example("with a bias")
def _biased_example(make: Make) -> Tensor:
    hidden, weight, bias = make(32, 2, 64), make(500, 64), make(500)
    return linear_cross_entropy(hidden, weight, _targets(hidden), bias=bias, recompute=False)


def _targets(hidden: Tensor) -> Tensor:
    return torch.arange(64, device=hidden.device).view(32, 2) * 7
