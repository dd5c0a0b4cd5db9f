"""Compute grouped matmuls, in which each group of rows is multiplied by its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.dispatch import Make, Operation, unsupported_dtype


def grouped_matmul(input: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply the first ``counts[0]`` rows by ``weight[0]``, the next ``counts[1]`` rows by ``weight[1]``,
    and so on.

    Args:
        input: ``[t, k]``, fp32, bf16 or fp16, the rows of each expert together.
        weight: ``[e, k, n]``, of the dtype of ``input``.
        counts: ``[e]``, integers on any device: the number of rows of each expert, with sum t. 0 is allowed.

    Returns:
        ``[t, n]``. An expert without rows gets a zero weight gradient.

    Raises:
        ValueError: the shapes do not match.

    Source: ``grouped_gemm.ops.gmm`` of the package grouped_gemm 1.1.4, which Megatron uses.
    """
    if input.dim() != 2 or weight.dim() != 3 or input.size(1) != weight.size(1):
        raise ValueError(
            f"input and weight must have the shapes [t, k] and [e, k, n], but got {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if counts.shape != weight.shape[:1]:
        raise ValueError(
            f"counts must have one entry for each of the {weight.size(0)} experts, but its shape is "
            f"{tuple(counts.shape)}"
        )
    return _GroupedMatmul.apply(input, weight, counts)


def grouped_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    counts: Tensor | Sequence[int],
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """Apply a separate linear layer to each group of rows, such as ``weights[0]`` and ``biases[0]`` to the
    first ``counts[0]`` rows.

    This is ``grouped_matmul`` for experts with separate weight tensors, which are not copied.

    Args:
        input: ``[t, i]``, fp32, bf16 or fp16, the rows of each expert together.
        weights: e tensors ``[o, i]``, of the dtype of ``input``.
        counts: ``[e]``, integers: the number of rows of each expert, with sum t. 0 is allowed.
        biases: e tensors ``[o]``, or None.

    Returns:
        ``[t, o]``. An expert without rows gets zero gradients.

    Raises:
        ValueError: the shapes do not match.
    """
    counts = torch.as_tensor(counts)
    if len(weights) != len(counts) or input.dim() != 2 or {w.size(-1) for w in weights} != {input.size(1)}:
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(
            f"the input must have shape [t, i], with one weight [o, i] for each of {len(counts)} experts, "
            f"but got {tuple(input.shape)} and {shapes}"
        )
    output = _GroupedLinear.apply(input, counts, *weights)
    if biases is None:
        return output
    counts = counts.to(output.device, non_blocking=True)
    return output + torch.stack(list(biases)).repeat_interleave(counts, dim=0, output_size=output.size(0))


Weights = Tensor | Sequence[Tensor]  # [e, k, n], or e of [k, n]


def _by_row_reference(rows: Tensor, weight: Weights, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ each for part, each in zip(parts, weight, strict=True)])


def _by_expert_reference(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    pairs = zip(rows.split(sizes), grad.split(sizes), strict=True)
    return torch.stack([part.t() @ of_part for part, of_part in pairs])


# [t, k], weights and [e] to [t, n]; and the gradient of the weights: [t, k], [t, n] and [e] to [e, k, n]
_by_row = Operation("grouped_matmul", _by_row_reference)
_by_expert = Operation("grouped_matmul_weight_gradient", _by_expert_reference, group="grouped_matmul")


class _GroupedMatmul(torch.autograd.Function):
    """Compute a grouped matmul, and its gradients with two more grouped matmuls."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight, counts)
        return _by_row(input.contiguous(), weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        d_input = _by_row(grad, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        d_weight = _by_expert(input.contiguous(), grad, counts) if ctx.needs_input_grad[1] else None
        return d_input, d_weight, None


class _GroupedLinear(torch.autograd.Function):
    """Compute a grouped matmul with a separate weight ``[o, i]`` for each group; the weights' gradients
    share one tensor.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(input, counts, *weights)
        return _by_row(input.contiguous(), [weight.t() for weight in weights], counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, counts, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        d_input = _by_row(grad, weights, counts) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return d_input, None, *(None for _ in weights)
        return d_input, None, *_by_expert(grad, input.contiguous(), counts)


@_by_row.on("cpu", note="one matmul per expert")
def _by_row_cpu(rows: Tensor, weight: Weights, counts: Tensor) -> Tensor:
    output = rows.new_empty(rows.size(0), weight[0].size(1))
    sizes = counts.tolist()
    for part, each, result in zip(rows.split(sizes), weight, output.split(sizes), strict=True):
        torch.mm(part, each, out=result)
    return output


@_by_expert.on("cpu", note="one matmul per expert")
def _by_expert_cpu(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    output = rows.new_empty(len(counts), rows.size(1), grad.size(1))
    sizes = counts.tolist()
    for part, of_part, result in zip(rows.split(sizes), grad.split(sizes), output, strict=True):
        torch.mm(part.t(), of_part, out=result)
    return output


def _beyond_cuda(rows: Tensor, other: Weights, counts: Tensor) -> str | None:
    """Return the limit of torch's ``grouped_mm`` (2.13) that the operands exceed, or None."""
    if not isinstance(other, Tensor):
        return None
    if rows.dtype is not torch.bfloat16:
        return f"torch's grouped_mm on cuda supports only bf16, but the rows are {rows.dtype}"
    if rows.size(1) % 8 or other.size(-1) % 8:
        return (
            f"torch's grouped_mm supports only sizes that are multiples of 8, but got {rows.size(1)} "
            f"and {other.size(-1)}"
        )
    return None


def _ends(counts: Tensor, device: torch.device) -> Tensor:
    return counts.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)


@_by_row.on(
    "cuda",
    supports=_beyond_cuda,
    note="`F.grouped_mm`; with separate weights, one matmul per expert",
    limits="bf16, sizes in multiples of 8",
)
def _by_row_cuda(rows: Tensor, weight: Weights, counts: Tensor) -> Tensor:
    if not isinstance(weight, Tensor):
        return _by_row_cpu(rows, weight, counts)
    return F.grouped_mm(rows, weight, offs=_ends(counts, rows.device))


@_by_expert.on("cuda", supports=_beyond_cuda, note="`F.grouped_mm`", limits="bf16, sizes in multiples of 8")
def _by_expert_cuda(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    counts = counts.to(rows.device, non_blocking=True)
    output = F.grouped_mm(rows.t(), grad, offs=_ends(counts, rows.device))
    return output.masked_fill_((counts == 0)[:, None, None], 0.0)  # nothing promises that those are written


# torch_npu 2.13, npu_grouped_matmul: sizes of the last dimensions, and number of experts; of a list, too
_NPU_SIZE, _NPU_EXPERTS, _NPU_WEIGHTS = 65536, 1024, 128
_NPU_LIMITS = (
    f"sizes below {_NPU_SIZE:,}, at most {_NPU_EXPERTS:,} experts ({_NPU_WEIGHTS} with separate "
    "weights), at least one row"
)


def _beyond_npu(rows: Tensor, other: Weights, counts: Tensor) -> str | None:
    """Return the documented limit of ``npu_grouped_matmul`` (torch_npu 2.13) that the operands exceed, or
    None.
    """
    experts, factor = (_NPU_EXPERTS, other) if isinstance(other, Tensor) else (_NPU_WEIGHTS, other[0])
    if max(rows.size(1), factor.size(-1)) >= _NPU_SIZE:
        return f"npu_grouped_matmul supports sizes below {_NPU_SIZE}"
    if len(counts) > experts:
        return f"npu_grouped_matmul supports at most {experts} experts, but got {len(counts)}"
    if not rows.size(0):
        return "npu_grouped_matmul requires at least one row"
    return unsupported_dtype("npu_grouped_matmul", rows.dtype)


def _npu(left: Tensor, right: Weights, counts: Tensor, group_type: int) -> Tensor:
    import torch_npu

    counts = counts.to(left.device, torch.int64, non_blocking=True)
    options = {"split_item": 3, "group_type": group_type, "group_list_type": 1}
    factors = [right] if isinstance(right, Tensor) else list(right)
    return torch_npu.npu_grouped_matmul([left], factors, group_list=counts, **options)[0]


@_by_row.on("npu", supports=_beyond_npu, note="`npu_grouped_matmul`", limits=_NPU_LIMITS)
def _by_row_npu(rows: Tensor, weight: Weights, counts: Tensor) -> Tensor:
    return _npu(rows, weight, counts, group_type=0)


@_by_expert.on("npu", supports=_beyond_npu, note="`npu_grouped_matmul`", limits=_NPU_LIMITS)
def _by_expert_npu(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return _npu(rows.t(), grad, counts, group_type=2).view(len(counts), rows.size(1), grad.size(1))


@_by_row.example()  # its gradient is the other operation
def _example(make: Make) -> Tensor:
    counts = torch.tensor([10, 0, 50, 36])  # an expert without rows is the case that goes wrong
    return grouped_matmul(make(96, 32), make(4, 32, 48), counts)


@_by_row.example("weights one by one")
def _example_of_weights(make: Make) -> Tensor:
    return grouped_linear(make(96, 32), [make(48, 32) for _ in range(3)], [46, 0, 50])
