"""Compute rotary position embedding (Su et al. 2021), in the half and interleaved forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.caching import cache_on_tensor
from megatron_npu.ops.dispatch import Make, Operation, takes_kernel, unsupported_dtype
from megatron_npu.ops.tiling import row_slices
from megatron_npu.ops.triton.rotary import Rotary


def rotary(input: Tensor, angles: Tensor, interleaved: bool = False, scale: float = 1.0) -> Tensor:
    """Rotate pairs of elements in the last dimension of ``input`` by ``angles``.

    Args:
        input: ``[s, b, n, d]``, fp32, bf16 or fp16 (packed sequences: ``[t, 1, n, d]``).
        angles: fp32, ``[s, 1, 1, r]`` or broadcastable to ``[s, b, n, r]`` with even r <= d, in the order of
            the pairs' elements; channels after the first r are returned unchanged.
        interleaved: whether element 2i is paired with 2i + 1; otherwise, i is paired with i + r/2.
        scale: the factor applied to sine and cosine (YaRN's ``mscale``).

    Returns:
        ``[s, b, n, d]``, contiguous, in the dtype of ``input``. Tables and products are fp32 and rounded
        once, except in the NPU's kernel; upstream rounds the tables to the dtype of ``input``.

    Raises:
        ValueError: r is odd or larger than d.
    """
    size = angles.size(-1)
    if size % 2 or size > input.size(-1):
        raise ValueError(
            f"the last dimension of angles must be even and at most {input.size(-1)}, but got {size}"
        )
    return _rotary(input, *_tables(angles, scale), interleaved)


def rotary_by_tables(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool = False) -> Tensor:
    """Apply rotary embedding with precomputed tables of cosines and sines, as in Transformers' layers.

    Args:
        input: ``[s, b, n, d]`` or ``[b, s, n, d]``.
        cosine, sine: ``[s, 1, 1, r]`` or ``[b or 1, s, 1, r]``, even r <= d, with each angle twice, as in
            ``rotary``. fp32 tables result in the precision of ``rotary``.
        interleaved: see ``rotary``.
    """
    return _rotary(input, cosine, sine, interleaved)


def _tables(angles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of ``angles`` in fp32, multiplied by ``scale``.

    The tables are cached with the angles: Megatron passes the same angles to every layer in every step.
    """
    return cache_on_tensor(angles, "rotary", lambda: _compute_tables(angles, scale), scale)


def _compute_tables(angles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    precise = angles.detach().float()
    cosine, sine = precise.cos(), precise.sin()
    return (cosine, sine) if scale == 1.0 else (cosine * scale, sine * scale)


def _reference(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    size = cosine.size(-1)
    x = input[..., :size].to(torch.promote_types(input.dtype, torch.float32))
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.cat(((x * cosine + turned * sine).to(input.dtype), input[..., size:]), -1)


_rotary = Operation("rotary", _reference)


class _Rotary(torch.autograd.Function):
    """Rotary embedding that saves only its tables for the backward pass.

    The backward pass rotates the gradient by the negative angles.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return _turn(input, cosine, sine, interleaved, forth=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(grad, cosine, sine, ctx.interleaved, forth=False), None, None, None


def _pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _turn(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, forth: bool) -> Tensor:
    """Rotate pairs of elements forward or backward, given the cosine and the sine for each element."""
    size = cosine.size(-1)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    whole = input.device.type != "cpu" or cosine.size(0) != input.size(0)
    for rows in [slice(None)] if whole else row_slices(input.size(0), input.numel() // max(1, input.size(0))):
        x = input[rows, ..., :size].to(torch.promote_types(input.dtype, torch.float32))
        result = x * cosine[rows]
        (a, b), (sine_a, sine_b) = _pair(x, interleaved), _pair(sine[rows], interleaved)
        result_a, result_b = _pair(result, interleaved)
        if forth:
            result_a.addcmul_(b, sine_a, value=-1)
            result_b.addcmul_(a, sine_b)
        else:
            result_a.addcmul_(b, sine_b)
            result_b.addcmul_(a, sine_a, value=-1)
        output[rows, ..., :size] = result
    output[..., size:] = input[..., size:]
    return output


_rotary.on("cpu", note="multiplied in fp32, with tables computed once")(_Rotary.apply)


@_rotary.on("cuda", note="one Triton kernel per direction⁶, else as on cpu")
def _cuda(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    if takes_kernel("rotary", input, cosine, sine, beyond=_beyond_kernel(input, cosine, sine)):
        return Rotary.apply(input, cosine, sine, interleaved)
    return _Rotary.apply(input, cosine, sine, interleaved)


def _beyond_kernel(input: Tensor, cosine: Tensor, sine: Tensor) -> str | None:
    if input.dim() != 4 or cosine.dim() != 4 or cosine.shape != sine.shape:
        return (
            f"the tables and the input must all have 4 dimensions, but got {tuple(cosine.shape)}, "
            f"{tuple(sine.shape)} and {tuple(input.shape)}"
        )
    if not cosine.size(-1):
        return "the input has no channels to rotate"
    return None


def _beyond_npu(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> str | None:
    """Return the documented limit of ``npu_rotary_mul`` (torch_npu 2.13) that the tensors exceed, or None."""
    if input.dim() != 4 or cosine.dim() != 4:
        return f"npu_rotary_mul supports only 4 dimensions, but got {input.dim()} and {cosine.dim()}"
    sequence_first = cosine.shape[:3] == (input.size(0), 1, 1)
    if not sequence_first and (beyond := _beyond_tables_of_batches(input, cosine, interleaved)) is not None:
        return beyond
    if (size := cosine.size(-1)) >= 896:
        return f"npu_rotary_mul supports only head sizes below 896, but got {size}"
    batch, heads = input.size(1 if sequence_first else 0), input.size(2)
    if max(batch, heads, batch * heads if interleaved else 0) >= 1000:
        return f"npu_rotary_mul supports fewer than 1000 sequences and heads, but got {batch} and {heads}"
    return _beyond_dtype_and_place(input)


def _beyond_tables_of_batches(input: Tensor, cosine: Tensor, interleaved: bool) -> str | None:
    """Return the reason why tables ``[b or 1, s, 1, d]`` are not supported, or None if they are."""
    if cosine.shape[:3] not in ((1, input.size(1), 1), (*input.shape[:2], 1)):
        return (
            "npu_rotary_mul supports only tables of shape [s, 1, 1, d] or [b, s, 1, d], but got "
            f"{list(cosine.shape)}"
        )
    if interleaved and cosine.size(0) > 1:
        return "npu_rotary_mul rotates interleaved pairs only if all sequences have the same tables"
    return None


def _beyond_dtype_and_place(input: Tensor) -> str | None:
    unsupported = unsupported_dtype("npu_rotary_mul", input.dtype)
    if unsupported is None and input.device.type == "cpu":
        return "npu_rotary_mul supports only tensors on the NPU, but got tensors on the host"
    return unsupported


@_rotary.on(
    "npu",
    supports=_beyond_npu,
    note="`npu_rotary_mul`, tables in the input's dtype",
    limits="[s, b, n, d], tables [s, 1, 1, d], or [b, s, n, d], [b, s, 1, d]; d < 896, b and n < 1000 "
    "(b·n interleaved)",
)
def _npu(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    import torch_npu

    size = cosine.size(-1)
    mode = "interleave" if interleaved else "half"
    tables = (_in_dtype(cosine, input.dtype), _in_dtype(sine, input.dtype))
    turned = torch_npu.npu_rotary_mul(input[..., :size].contiguous(), *tables, mode)
    return turned if size == input.size(-1) else torch.cat((turned, input[..., size:]), -1)


def _in_dtype(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a table converted to the dtype of the input.

    The result is cached with the table, because every layer uses it.
    """
    return cache_on_tensor(table, "rotary_table", lambda: table.to(dtype), dtype)


@_rotary.example()
def _example(make: Make) -> Tensor:
    input = make(64, 2, 4, 64)
    positions = torch.arange(64, dtype=torch.float32, device=input.device)
    turns = positions[:, None] * torch.linspace(1, 0.01, 32, dtype=torch.float32, device=input.device)
    return rotary(input, torch.cat([turns, turns], dim=-1)[:, None, None, :])
