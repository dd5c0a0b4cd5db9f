"""Define reference kernels for matmuls that exchange their operands or results between ranks.

The collective runs on the named communicator, so its bytes, order and errors are the same as for a separate
collective (docs/reference/simulator-hccl.md).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel

_HCCL_TYPES = {torch.float16: 3, torch.bfloat16: 11}  # HcclDataType


@kernel("npu_all_gather_base_mm")
def npu_all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather ``input`` ``[m, k]`` from all ranks into ``[world_size * m, k]``, and multiply it by ``x2``
    ``[k, n]``.

    Returns:
        The product ``[world_size * m, n]``, and the gathered input, which is empty if it is not requested.
    """
    gathered = input.new_empty(world_size * input.size(0), input.size(1))
    _collective("AllGather", hcom, input, gathered, input.numel())
    return gathered @ x2, gathered if gather_output else input.new_empty(0)


@kernel("npu_mm_reduce_scatter_base")
def npu_mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> Tensor:
    """Return this rank's part ``[m / world_size, n]`` of the sum of ``input · x2`` over all ranks."""
    product = input @ x2
    part = product.new_empty(product.size(0) // world_size, product.size(1))
    _collective("ReduceScatter", hcom, product, part, part.numel())
    return part


@kernel("npu_mm_all_reduce_base")
def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    x3: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    comm_quant_scale_1: Tensor | None = None,
    comm_quant_scale_2: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    group_sizes: list[int] | None = None,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    dequant_scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    comm_quant_mode: int = 0,
    comm_mode: str | None = None,
) -> Tensor:
    """Return the sum over all ranks of ``x1`` ``[..., k]`` times ``x2`` ``[k, n]``."""
    product = (x1 @ x2).contiguous()
    total = torch.empty_like(product)
    _collective("AllReduce", hcom, product, total, product.numel())
    return total


def _collective(operation: str, hcom: str, given: Tensor, result: Tensor, count: int) -> None:
    """Run a collective on host memory, and wait until it is complete.

    ``count`` is the number of elements of the smaller buffer.

    Raises:
        RuntimeError: the communicator does not exist, or the ranks' calls do not match.
    """
    given = given.contiguous()
    dtype = _HCCL_TYPES[given.dtype]
    names = operation.encode(), hcom.encode()
    code = _sim_collective()(*names, given.data_ptr(), result.data_ptr(), count, dtype)
    if code:
        raise RuntimeError(f"{operation} on communicator {hcom} failed inside a matmul: HCCL error {code}")


@functools.cache
def _sim_collective() -> Callable[..., int]:
    from megatron_npu.sim import build  # the kernels are imported without a simulator, too

    function = build.runtime_library().sim_collective
    function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    function.argtypes += [ctypes.c_uint64, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
