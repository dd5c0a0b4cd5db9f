"""Compute linear layers with faster CPU matmuls and with a backward pass that skips rows without a
gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops import compiled
from megatron_npu.ops.compiled import products
from megatron_npu.ops.dispatch import Make, Operation
from megatron_npu.ops.triton.launching import is_fake

# From this many outputs on a gradient is looked through for rows of zeros: heads over a vocabulary, of which
# a masked language model predicts 15 % and padding none. Looking costs a thousandth of the products.
_WIDE = 4096
_HALVES = (torch.bfloat16, torch.float16)
_WORTH_GATHERING = 0.75  # of the rows; with more of them alive, all are multiplied


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """Return ``input · weightᵀ + bias``.

    Args:
        input: ``[..., h_in]``, fp32, bf16 or fp16.
        weight: ``[h_out, h_in]``, of the dtype of ``input``.
        bias: ``[h_out]``, or None.
        transposed: whether the weight is ``[h_in, h_out]``, as in GPT-2's ``Conv1D``.

    Returns:
        ``[..., h_out]``, contiguous, in the dtype of ``input``.
    """
    return _linear(input, weight, bias, transposed)


def faster_than_torch(dtype: torch.dtype) -> bool:
    """Return True if matmuls of ``dtype`` on this CPU are faster with this module than with ``F.linear``.

    torch multiplies fp32 matrices with MKL, which uses only AVX2 on non-Intel processors; oneDNN uses AVX-512
    there and takes half the time (measured on a Zen 5). For bf16, we have our own kernel, which is used where
    fp32 arithmetic is fastest (``compiled.products``).
    """
    if dtype is torch.bfloat16:
        return products.are_fastest()
    return dtype is torch.float32 and _ONEDNN_BEATS_MKL


def looks_for_dead_rows(outputs: int) -> bool:
    """Return True if the backward pass skips rows without a gradient.

    Only CPUs do so.
    """
    return outputs >= _WIDE


def _onednn_beats_mkl() -> bool:
    mkldnn = getattr(torch.ops, "mkldnn", None)
    if not torch.backends.mkldnn.is_available() or not hasattr(mkldnn, "_linear_pointwise"):
        return False
    info = Path("/proc/cpuinfo")
    vendor = info.read_text(encoding="utf-8") if info.is_file() else "GenuineIntel"
    return "GenuineIntel" not in vendor and "AVX512" in torch.backends.cpu.get_cpu_capability()


_ONEDNN_BEATS_MKL = _onednn_beats_mkl()  # a constant of graphs, too


def _reference(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return F.linear(input, weight.t() if transposed else weight, bias)


_linear = Operation("linear", _reference)
_linear.on("cuda", "npu", note="`F.linear`")(_reference)


@_linear.on(
    "cpu",
    note="`F.linear`; fp32 with oneDNN where MKL is slow³, bf16 with ours where oneDNN is slow⁵; only rows "
    "with a gradient",
)
def _cpu(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if faster_than_torch(input.dtype) or looks_for_dead_rows(weight.size(1 if transposed else 0)):
        return _CpuLinear.apply(input, weight, bias, transposed)
    return _reference(input, weight, bias, transposed)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left · rightᵀ + bias`` for matrices on any device.

    On a CPU, the faster library is used.
    """
    if not _has_faster(left):
        return F.linear(left, right, bias)
    if torch.compiler.is_compiling():
        return _in_a_graph(left, right, bias)
    return _faster(left, right, bias)


def _has_faster(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and faster_than_torch(tensor.dtype)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return ``torch.matmul(left, right)``, computed by a faster CPU library if ``right`` is a matrix.

    Args:
        left: ``[..., m]``.
        right: ``[m, k]``, for the faster library.
    """
    matrices = right.dim() == 2 and left.dim() >= 2 and left.dtype is right.dtype
    if not matrices or torch.compiler.is_compiling() or not _has_faster(left):
        return torch.matmul(left, right)
    result = _faster(left.flatten(0, -2), right.t(), None)
    return result.resize_(*left.shape[:-1], right.size(1))  # not a view


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left · rightᵀ`` to ``total``, in a single call if the device has an accumulating matmul.

    Args:
        total: ``[n, k]``, fp32 or in the operands' dtype; changed in place.
        left: ``[n, m]``.
        right: ``[k, m]``.
    """
    if products.adds(total, left, right.t()):
        products.add(total, left, right.t())
    elif products.are_fastest() and products.takes(left, right.t()) and products.takes_result(total):
        products.multiply(left, right.t(), total, add=True)
    elif total.dtype is left.dtype and not _has_faster(left):
        total.addmm_(left, right.t())
    elif _gpu_adds(total, left):
        torch.ops.aten.addmm.dtype_out(total, left, right.t(), total.dtype, out=total)
    else:
        compiled.accumulate(total, product(left, right))


def _gpu_adds(total: Tensor, left: Tensor) -> bool:
    """Return True if the GPU's 16-bit matmuls can accumulate into an fp32 tensor without rounding (torch
    2.8 or later).
    """
    if not left.is_cuda or total.dtype is not torch.float32 or left.dtype not in _HALVES:
        return False
    return hasattr(torch.ops.aten.addmm, "dtype_out") and not is_fake(total)  # 2.11 knows no shape of it


def _faster(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    if not _fit(left, right, bias):
        return F.linear(left, right, bias)  # which says what is wrong, or repeats a bias of one value
    if products.takes(left, right.t()):
        return products.multiply(left, right.t(), left.new_empty(left.size(0), right.size(0)), bias)
    if left.dtype is torch.bfloat16 or not left.numel() or not right.numel():
        return F.linear(left, right, bias)  # oneDNN has no empty products
    if bias is not None:
        # torch 2.13 hands oneDNN the address of a bias without its strides.
        bias = bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def _fit(left: Tensor, right: Tensor, bias: Tensor | None) -> bool:
    """Return True if the operands are matrices of the same dtype that can be multiplied, with a matching
    bias or no bias.
    """
    if left.dim() != 2 or right.dim() != 2 or left.size(1) != right.size(1) or left.dtype is not right.dtype:
        return False
    return bias is None or (bias.dtype is left.dtype and bias.shape == (right.size(0),))


# A node of its own for graphs: inductor takes the operation above for one with a constant weight, and fails.
_in_a_graph = torch.library.custom_op(
    "megatron_npu::linear",
    _faster,
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor? bias) -> Tensor",
)
_in_a_graph.register_fake(lambda left, right, bias: left.new_empty(left.size(0), right.size(0)))


class _CpuLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.transposed = transposed
        rows = input.reshape(-1, input.size(-1))
        output = product(rows, weight.t() if transposed else weight, bias)
        shape = (*input.shape[:-1], output.size(-1))
        # not a view, which must not be changed in place; a graph has no such rule, and no resize_
        return output.view(shape) if torch.compiler.is_compiling() else output.resize_(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        g, x = grad.reshape(-1, grad.size(-1)), input.reshape(-1, input.size(-1))
        alive = _rows_alive(g)
        g, x = (g, x) if alive is None else (g.index_select(0, alive), x.index_select(0, alive))
        d_input = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_rows = product(g, weight if ctx.transposed else weight.t())
            if alive is not None:
                d_rows = d_rows.new_zeros(input.numel() // x.size(1), x.size(1)).index_copy_(0, alive, d_rows)
            d_input = d_rows.view(input.shape)
        if ctx.needs_input_grad[1]:
            d_weight = product(x.t(), g.t()) if ctx.transposed else product(g.t(), x.t())
        if ctx.needs_input_grad[2]:
            d_bias = g.sum(0)  # torch adds 16 bits up in fp32 on a cpu
        return d_input, d_weight, d_bias, None


in_a_graph = _CpuLinear.apply  # what torch.compile sees of ``linear`` on a CPU


def _rows_alive(grad: Tensor) -> Tensor | None:
    """Return the indices of nonzero rows, or None if skipping the other rows would save too little time."""
    if not looks_for_dead_rows(grad.size(1)) or torch.compiler.is_compiling():
        return None
    alive = grad.any(1).nonzero().squeeze(1)
    return alive if alive.numel() < _WORTH_GATHERING * grad.size(0) else None


@_linear.example()
def _example(make: Make) -> Tensor:
    return linear(make(32, 2, 48), make(64, 48), make(64))
