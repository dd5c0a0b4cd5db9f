"""Add the weight gradient of a linear layer directly to the gradient buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.ops.dispatch import Make, Operation
from megatron_npu.ops.products.linear import add_product

_HALVES = (torch.bfloat16, torch.float16)
_NPU_SIZE = 65536  # npu_grouped_matmul_add of torch_npu 2.13 takes sizes below


def accumulate_weight_gradient(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add ``grad_outputᵀ · input`` to ``main_grad``, in a single pass if the device has an accumulating
    matmul.

    The device has one if all dtypes are equal, and for 16-bit operands and an fp32 buffer on an NPU and,
    since torch 2.8, on a GPU. Otherwise (a 16-bit model with an fp32 buffer on a cpu), the product is rounded
    to 16 bits and then added, as Megatron does without ``--gradient-accumulation-fusion``.

    Args:
        input: ``[..., h_in]``, the layer's input.
        grad_output: ``[..., h_out]``, of the same dtype.
        main_grad: ``[h_out, h_in]``, in fp32 or the dtype of the others; changed in place.
    """
    rows, grad_rows = input.reshape(-1, input.size(-1)), grad_output.reshape(-1, grad_output.size(-1))
    _weight_gradient(rows, grad_rows, main_grad)


def _reference(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    main_grad.add_(grad_output.t() @ input)


_weight_gradient = Operation("weight_gradient", _reference)


_weight_gradient_on_cpu = _weight_gradient.on(
    "cpu",
    note="one accumulating matmul; 16 bits into an fp32 buffer: matmul, then sum⁴, but for bf16 a single "
    "kernel of ours⁵",
)


@_weight_gradient_on_cpu
@_weight_gradient.on("cuda", note="one accumulating matmul, also for 16 bits into an fp32 buffer (torch 2.8)")
def _accumulate(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    if input.dtype is torch.float32:
        main_grad.addmm_(grad_output.t(), input)
    else:
        add_product(main_grad, grad_output.t(), input.t())


def _for_npu_kernel(input: Tensor, main_grad: Tensor) -> bool:
    return input.device.type == "npu" and main_grad.dtype is not input.dtype


def _beyond_npu(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> str | None:
    """Return the limit of ``npu_grouped_matmul_add_`` (torch_npu 2.13) that the tensors exceed, or None."""
    import torch_npu

    if not _for_npu_kernel(input, main_grad):
        return None
    if not hasattr(torch_npu, "npu_grouped_matmul_add_"):
        return "this torch_npu has no npu_grouped_matmul_add_"
    if not torch_npu.npu.utils.is_support_inf_nan():
        return "npu_grouped_matmul_add_ requires Ascend 910B or later"
    if input.dtype not in _HALVES or main_grad.dtype is not torch.float32:
        return f"npu_grouped_matmul_add_ does not support adding {input.dtype} to {main_grad.dtype}"
    if max(main_grad.shape) >= _NPU_SIZE:
        return f"npu_grouped_matmul_add_ supports sizes below {_NPU_SIZE}"
    if not input.size(0):
        return "npu_grouped_matmul_add_ requires at least one row"
    return None


@_weight_gradient.on(
    "npu",
    supports=_beyond_npu,
    note="16 bits into an fp32 buffer: `npu_grouped_matmul_add_`; otherwise as on cpu",
    limits="sizes below 65,536",
)
def _accumulate_npu(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Accumulate the weight gradient with the experts' grouped matmul, treating all rows as a single
    group.
    """
    import torch_npu

    if not _for_npu_kernel(input, main_grad):
        _accumulate(input, grad_output, main_grad)
        return
    rows = _rows(input.size(0), input.device)
    torch_npu.npu_grouped_matmul_add_(main_grad.unsqueeze(0), grad_output, input, rows)


@lru_cache_tensors(maxsize=16)
def _rows(count: int, device: torch.device) -> Tensor:
    """Return the number of rows as a tensor ``[1]`` on the device.

    All layers of a model share the tensor.
    """
    return torch.full((1,), count, dtype=torch.int64, device=device)


@_weight_gradient.example()
def _example(make: Make) -> None:
    input, grad_output = make(64, 48).detach(), make(64, 32).detach()
    main_grad = torch.ones(32, 48, dtype=torch.float32, device=input.device)
    accumulate_weight_gradient(input, grad_output, main_grad)
