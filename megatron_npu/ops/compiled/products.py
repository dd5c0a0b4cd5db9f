"""Products of bf16 matrices in fp32's arithmetic (``products.cpp``): where that is a CPU's fastest."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_npu.ops import compiled
from megatron_npu.ops.compiled.building import library

# Of each side. One row would be computed as fourteen, and of small products the call is most of the time.
_SMALLEST = 16


@torch.compiler.assume_constant_result
def are_fastest() -> bool:
    """Return whether bf16 is to be multiplied here: the processor is such a one, with our kernels."""
    return _fp32_is_faster() and library() is not None


@functools.cache
def _fp32_is_faster() -> bool:
    """Return whether this processor multiplies more fp32 values than bf16 ones in a second, and has AVX-512.

    Without an instruction for bf16 (Xeons up to Ice Lake) oneDNN widens values again and again: 27 GFLOPS,
    where fp32 has 310. Xeons since Sapphire Rapids are made to multiply bf16 with AMX; where a hypervisor
    hides that, an AVX-512 instruction is left, at half the rate of fp32's: 190 and 310 GFLOPS (two cores,
    torch 2.13). Those of AMD, and Cooper Lake, have it at twice the rate.
    """
    info = Path("/proc/cpuinfo")
    return fp32_is_faster_on(info.read_text(encoding="utf-8").split("\n\n")[0] if info.is_file() else "")


def fp32_is_faster_on(processor: str) -> bool:
    """Return the same of a processor as Linux describes it in ``/proc/cpuinfo``."""
    lines = (line.partition(":") for line in processor.splitlines())
    about = {name.strip(): value.strip() for name, _, value in lines}
    can = set(about.get("flags", "").split())
    if not can >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"} or "amx_bf16" in can:
        return False
    # Of Intel's, fp16 tells Sapphire Rapids and its successors from Cooper Lake.
    slow = about.get("vendor_id") == "GenuineIntel" and "avx512_fp16" in can
    return "avx512_bf16" not in can or slow


def takes(left: Tensor, right: Tensor) -> bool:
    """Return whether ``multiply`` is to have these factors, ``[..., n, m]`` and ``[..., m, k]``."""
    for tensor in (left, right):
        if tensor.dtype is not torch.bfloat16 or not compiled.is_plain(tensor):
            return False
    return min(*left.shape[-2:], right.size(-1)) >= _SMALLEST and are_fastest()


def takes_result(out: Tensor) -> bool:
    """Return whether ``multiply`` can write to a tensor ``[..., n, k]``."""
    plain = compiled.is_plain(out) and out.dtype in (torch.float32, torch.bfloat16)
    return plain and out.dim() in (2, 3) and out.stride(-1) == 1


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    factor: float = 1.0,
    add: bool = False,
) -> Tensor:
    """Write ``factor · left · right + bias`` to ``out`` and return it; sums are in fp32 and rounded once.

    Args:
        left: ``[n, m]`` or ``[b, n, m]``, of any strides; ``takes`` says whether.
        right: ``[m, k]`` or ``[b, m, k]``.
        out: ``[n, k]`` or ``[b, n, k]``, fp32 or bf16, with contiguous rows.
        bias: ``[k]``, or None.
        factor: of the product.
        add: whether to add to what is in ``out``.
    """
    a, b, c = (tensor if tensor.dim() == 3 else tensor.unsqueeze(0) for tensor in (left, right, out))
    a, b = (_with_a_contiguous_side(tensor) for tensor in (a, b))
    added = None if bias is None else bias.detach().to(torch.float32).contiguous()
    precise, rounded = (c, None) if c.dtype is torch.float32 else (None, c)
    results = (_pointer(precise), _pointer(rounded), *map(ctypes.c_int64, c.stride()[:2]), _pointer(added))
    sizes = map(ctypes.c_int64, (add, a.size(0), a.size(1), b.size(2), a.size(2)))
    _kernel()(
        *_pointer_and_strides(a),
        *_pointer_and_strides(b),
        *results,
        ctypes.c_float(factor),
        *sizes,
        torch.get_num_threads(),
    )
    return out


def _kernel() -> Callable[..., None]:
    loaded = library()
    assert loaded is not None, "takes() says whether there are kernels"
    return loaded.product_bfloat16


def _with_a_contiguous_side(tensor: Tensor) -> Tensor:
    return tensor if 1 in tensor.stride()[1:] else tensor.contiguous()


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _pointer_and_strides(tensor: Tensor) -> list[ctypes.c_void_p | ctypes.c_int64]:
    return [_pointer(tensor), *map(ctypes.c_int64, tensor.stride())]
