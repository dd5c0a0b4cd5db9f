"""Multiply bf16 matrices with fp32 accumulation, on CPUs on which our kernel is faster than oneDNN."""

from __future__ import annotations

import enum
import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_npu.ops.compiled import abi
from megatron_npu.ops.compiled.building import library

# Of each side. One row would be computed as fourteen, and of small products the call is most of the time.
_SMALLEST = 16
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


class Arithmetic(enum.Enum):
    """The kind of instructions with which our kernel multiplies bf16 matrices on a processor."""

    WIDENED = "with fp32 multiply-adds: the fastest way if the CPU has no faster bf16 instruction"
    PAIRED = "with AVX-512's bf16 instruction, at twice the fp32 rate: as fast as oneDNN"


@torch.compiler.assume_constant_result
def are_fastest() -> bool:
    """Return True if our kernel is the best choice for all bf16 matmuls on this processor.

    This requires that oneDNN takes at least twice as long.

    Where both are equally fast (``has_kernel``), our kernel does only the matmuls for which torch needs
    copies: batches of strided heads, results in fp32, and products added to a tensor.
    """
    return _arithmetic() is Arithmetic.WIDENED and library() is not None


@torch.compiler.assume_constant_result
def has_kernel() -> bool:
    """Return True if our bf16 matmul kernel is available and not slower than oneDNN on this processor."""
    return _usable_arithmetic() is not None


@functools.cache
def _arithmetic() -> Arithmetic | None:
    """Return how our kernel should multiply bf16 matrices on this processor, or None if oneDNN is faster.

    Without an instruction for bf16 (Xeons up to Ice Lake), oneDNN widens values repeatedly: 27 GFLOPS,
    compared with 310 for fp32. Xeons since Sapphire Rapids are designed to multiply bf16 with AMX; if a
    hypervisor hides AMX, an AVX-512 instruction remains, at half the rate of fp32: 190 and 310 GFLOPS (two
    cores, torch 2.13). AMD's processors, and Cooper Lake, run that instruction at twice the fp32 rate.
    """
    return arithmetic_of(_processor())


@functools.cache
def has_avx512() -> bool:
    """Return True if this processor has AVX-512, which some of our kernels require."""
    return _features_of(_processor()) >= _AVX512


def _processor() -> str:
    """Return the entry for the first processor in Linux's ``/proc/cpuinfo``, or an empty string."""
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8").split("\n\n")[0] if info.is_file() else ""


def arithmetic_of(processor: str) -> Arithmetic | None:
    """Return how our kernel should multiply bf16 matrices on a processor, given its entry in
    ``/proc/cpuinfo``.
    """
    can = _features_of(processor)
    if not can >= _AVX512 or "amx_bf16" in can:
        return None
    # Of Intel's, fp16 tells Sapphire Rapids and its successors from Cooper Lake.
    slow = _field(processor, "vendor_id") == "GenuineIntel" and "avx512_fp16" in can
    return Arithmetic.WIDENED if slow or "avx512_bf16" not in can else Arithmetic.PAIRED


def _features_of(processor: str) -> set[str]:
    return set(_field(processor, "flags").split())


def _field(processor: str, name: str) -> str:
    lines = (line.partition(":") for line in processor.splitlines())
    return next((value.strip() for field, _, value in lines if field.strip() == name), "")


def _usable_arithmetic() -> Arithmetic | None:
    """Return how our kernel can multiply bf16 matrices here, or None if the kernels are not available."""
    wanted, loaded = _arithmetic(), library()
    if loaded is None or (wanted is Arithmetic.PAIRED and not abi.can_pair(loaded)):
        return None
    return wanted


def pairs() -> bool:
    """Return True if our kernel uses bf16 dot-product instructions, and False if it converts bf16 to fp32."""
    return _arithmetic() is Arithmetic.PAIRED


def takes(left: Tensor, right: Tensor) -> bool:
    """Return True if ``multiply`` should be used for the given operands, ``[n, m]`` and ``[m, k]`` or batches
    of them.

    Operands with mismatched shapes are left to torch, which reports the error.
    """
    if left.dtype is not torch.bfloat16 or right.dtype is not torch.bfloat16:
        return False
    if left.dim() != right.dim() or left.dim() not in (2, 3):
        return False
    if left.size(-1) != right.size(-2) or left.shape[:-2] != right.shape[:-2]:
        return False
    if not abi.is_plain(left) or not abi.is_plain(right):
        return False
    return min(*left.shape[-2:], right.size(-1)) >= _SMALLEST and has_kernel()


def takes_result(out: Tensor) -> bool:
    """Return True if ``multiply`` can write its result to the given tensor ``[..., n, k]``."""
    plain = abi.is_plain(out) and out.dtype in (torch.float32, torch.bfloat16)
    return plain and out.dim() in (2, 3) and out.stride(-1) == 1 and not abi.overlaps(out)


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    factor: float = 1.0,
    add: bool = False,
) -> Tensor:
    """Write ``factor · left · right + bias`` to ``out``, and return ``out``.

    Sums are accumulated in fp32 and rounded once.

    Args:
        left: ``[n, m]`` or ``[b, n, m]``, with strides that ``takes`` accepts.
        right: ``[m, k]`` or ``[b, m, k]``.
        out: ``[n, k]`` or ``[b, n, k]``, fp32 or bf16, with contiguous rows.
        bias: ``[k]``, or None.
        factor: multiplies the product.
        add: whether to add to the contents of ``out``.
    """
    a, b, c = (left, right, out) if left.dim() == 3 else (left[None], right[None], out[None])
    a, b = _with_a_unit_stride(a), _with_a_unit_stride(b)
    with _shown("product"):
        abi.product(a, b, c, _widened(bias), factor, add=add, paired=pairs())
    return out


def adds(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Return True if ``add`` should be used for the given operands, which must be bf16 matrices and an fp32
    total.

    oneDNN rounds the product before adding it. For fp32, MKL adds within the matmul and is as fast.
    """
    if torch.compiler.is_compiling() or total.dtype is not torch.float32 or not takes_result(total):
        return False
    return total.shape == (left.size(0), right.size(-1)) and takes(left, right)


def add(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product ``left · right`` to ``total`` without rounding it to bf16.

    Args:
        total: ``[n, k]``, fp32, with contiguous rows; changed in place.
        left: ``[n, m]``, bf16.
        right: ``[m, k]``.
    """
    a, b = _with_a_unit_stride(left), _with_a_unit_stride(right)
    with _shown("add_product"):
        abi.add_product(total, a, b, name_of_arithmetic(a.dtype))


def has_exponentials(left: Tensor, right: Tensor) -> bool:
    """Return True if ``exponentials`` should be used for the given operands, which must be bf16 matrices."""
    return not torch.compiler.is_compiling() and left.dim() == 2 and takes(left, right)


def exponentials(left: Tensor, right: Tensor, bias: Tensor | None, reference: Tensor, sums: Tensor) -> Tensor:
    """Return ``exp(left · right + bias - reference)``, and add the sums of the unrounded rows to ``sums``.

    Args:
        left: ``[n, m]``, bf16.
        right: ``[m, k]``, bf16.
        bias: ``[k]``, or None.
        reference: ``[n]``, fp32, contiguous.
        sums: like ``reference``; changed in place.

    Returns:
        ``[n, k]``, bf16.
    """
    a, b = _with_a_unit_stride(left), _with_a_unit_stride(right)
    output = a.new_empty(a.size(0), b.size(1))
    with _shown("exponentials_of_product"):
        arithmetic = name_of_arithmetic(a.dtype)
        abi.exponentials_of_product(a, b, _widened(bias), reference, output, sums, arithmetic)
    return output


def _shown(name: str) -> AbstractContextManager[object]:
    """Return a context manager that shows a kernel in torch's profiler if a profiler is active."""
    return record_function(f"megatron_npu::{name}") if torch.autograd._profiler_enabled() else nullcontext()


def _with_a_unit_stride(matrix: Tensor) -> Tensor:
    return matrix if 1 in matrix.stride()[-2:] else matrix.contiguous()


def _widened(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().to(torch.float32).contiguous()


def name_of_arithmetic(dtype: torch.dtype) -> str:
    """Return the suffix of kernel names for operands of the given dtype."""
    if dtype is torch.float32:
        return "single"
    return "paired" if pairs() else "widened"
