"""Compute linear layers with tensor and sequence parallelism, with each matmul fused with its collective.

For NPUs: ``npu_all_gather_base_mm`` and ``npu_mm_reduce_scatter_base`` multiply parts that have arrived while
others are in transit. The communication is that of Megatron's layers (Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", figure 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

RANKS = (2, 4, 8)
_HALVES = (torch.bfloat16, torch.float16)
_SIZES = range(256, 65535)  # of both sides of a weight: each is a product's inner one, forward or backward

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

WeightGradient = Callable[[Tensor, Tensor], Tensor | None]


def beyond(weight: Tensor, ranks: int) -> str | None:
    """Return the documented limit of torch_npu 2.13's fused operations that a parallel layer exceeds, or
    None.

    Args:
        weight: ``[h_out, h_in]``, this rank's part.
        ranks: number of ranks that share the layer.
    """
    if ranks not in RANKS:
        return f"fused matmul-communication kernels support only 2, 4 or 8 ranks, but there are {ranks}"
    if weight.dtype not in _HALVES:
        return (
            "fused matmul-communication kernels support only bf16 and fp16, but the weight is "
            f"{str(weight.dtype).removeprefix('torch.')}"
        )
    if any(size not in _SIZES for size in weight.shape):
        sides = " x ".join(map(str, weight.shape))
        return (
            f"fused matmul-communication kernels support only dimensions from {_SIZES[0]} to "
            f"{_SIZES[-1]}, but got {sides}"
        )
    return None


def gathered_linear(
    input: Tensor, weight: Tensor, group: dist.ProcessGroup, weight_gradient: WeightGradient
) -> Tensor:
    """Gather the ranks' parts of a sequence, and multiply the whole sequence by the weight.

    This is a column-parallel layer without a bias.

    The gathered input is not saved: backward gathers it again while it multiplies the gradient.

    Args:
        input: ``[s / ranks, b, h_in]``, bf16 or fp16.
        weight: ``[h_out, h_in]``, of the same dtype; this rank's part.
        group: the ranks.
        weight_gradient: takes ``[m, h_in]`` and ``[m, h_out]``; returns ``[h_out, h_in]``, or None if it
            stored the gradient elsewhere.

    Returns:
        ``[s, b, h_out]``.
    """
    return _Gathered.apply(input, weight, group, weight_gradient)


def scattered_linear(
    input: Tensor, weight: Tensor, group: dist.ProcessGroup, weight_gradient: WeightGradient
) -> Tensor:
    """Multiply by the weight, sum the products over the ranks, and keep this rank's part of the sequence.

    This is a row-parallel layer.

    Args:
        input: ``[s, b, h_in]``, bf16 or fp16; this rank's columns.
        weight: ``[h_out, h_in]``, of the same dtype; this rank's part.
        group: the ranks; ``s`` is a multiple of their number.
        weight_gradient: see ``gathered_linear``.

    Returns:
        ``[s / ranks, b, h_out]``.
    """
    return _Scattered.apply(input, weight, group, weight_gradient)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, group: dist.ProcessGroup, weight_gradient: WeightGradient
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.group, ctx.weight_gradient = group, weight_gradient
        output, _ = _gather_and_multiply(_rows(input), weight.t(), group, keep=False)
        return output.view(-1, *input.shape[1:-1], output.size(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows, grad_rows, group = _rows(input), _rows(grad), ctx.group
        wanted, arriving = ctx.needs_input_grad[1], None
        if wanted:
            gathered = rows.new_empty(group.size() * rows.size(0), rows.size(1))
            arriving = _all_gather(gathered, rows, group=group, async_op=True)
        d_input = None
        if ctx.needs_input_grad[0]:
            d_input = _multiply_and_scatter(grad_rows, weight, group).view(input.shape)
        if arriving is None:
            return d_input, None, None, None
        arriving.wait()
        return d_input, ctx.weight_gradient(gathered, grad_rows), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, group: dist.ProcessGroup, weight_gradient: WeightGradient
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.group, ctx.weight_gradient = group, weight_gradient
        output = _multiply_and_scatter(_rows(input), weight.t(), group)
        return output.view(-1, *input.shape[1:-1], output.size(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        d_input, gathered = _gather_and_multiply(_rows(grad), weight, ctx.group, ctx.needs_input_grad[1])
        d_weight = ctx.weight_gradient(_rows(input), gathered) if ctx.needs_input_grad[1] else None
        return d_input.view(input.shape), d_weight, None, None


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.size(-1)).contiguous()


def _gather_and_multiply(
    rows: Tensor, factor: Tensor, group: dist.ProcessGroup, keep: bool
) -> tuple[Tensor, Tensor]:
    import torch_npu

    return torch_npu.npu_all_gather_base_mm(
        rows, factor, _communicator(group), group.size(), gather_output=keep
    )


def _multiply_and_scatter(rows: Tensor, factor: Tensor, group: dist.ProcessGroup) -> Tensor:
    import torch_npu

    return torch_npu.npu_mm_reduce_scatter_base(rows, factor, _communicator(group), group.size())


def _communicator(group: dist.ProcessGroup) -> str:
    """Return the name of a process group's HCCL communicator, creating the communicator if necessary."""
    backend: Any = group._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(dist.get_rank())
