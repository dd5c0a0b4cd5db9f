"""Apply dropout, either alone or fused with the bias and residual of a transformer layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.dispatch import Operation, takes_kernel
from megatron_npu.ops.tiling import rows_per_tile, scratch_buffers
from megatron_npu.ops.triton.residual import BiasDropoutAdd

# On a CPU 16 random bits decide about one value, so a probability of keeping is a multiple of 2^-16.
KEEP_LEVELS = 1 << 16
_DRAWN_TOGETHER = 1 << 16  # decisions of a mask in a graph; a multiple of 4, so that no draw is split
_KEEP_MASK = "megatron_npu::keep_mask"


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool) -> Tensor:
    """Return ``residual + dropout(x + bias)``.

    Args:
        x: ``[..., h]``, fp32, bf16 or fp16.
        bias: ``[h]``, or None.
        residual: like ``x``; if its dtype differs, it is cast to that of ``x``, as in upstream.
        p: probability of dropping a value; uses the device's generator, so Megatron's RNG tracker controls
            the draws.
        training: whether values are dropped.

    Returns:
        Like ``x``; in inference without gradients, ``x`` itself, changed in place as in upstream.

    Raises:
        ValueError: ``p`` is not in [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be in [0, 1], but got {p}")
    residual = residual.to(x.dtype)
    if training and p > 0.0:
        return _bias_dropout_add(x, bias, residual, p)
    if training or _needs_grad(x, bias, residual):
        if _on_gpu(x):
            return _bias_dropout_add(x, bias, residual, 0.0)
        return residual + (x if bias is None else x + bias)
    return (x if bias is None else x.add_(bias)).add_(residual)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Return ``x`` after dropout.

    The arguments and errors are those of ``bias_dropout_add``.

    Returns:
        A tensor like ``x``, or ``x`` itself if nothing is dropped.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be in [0, 1], but got {p}")
    return _dropout(x, p) if training and p > 0.0 else x


def dropout_in_a_graph(x: Tensor, p: float, training: bool) -> Tensor:
    """Compute ``dropout`` on a CPU in a graph that torch.compile traces.

    Only drawing the mask is a separate node, so that the rest can be fused.

    The dropped values are those of ``dropout``. inductor's own code for torch's dropout draws one value at a
    time without vector instructions (torch 2.13): 16 ns per value on a Zen 5, compared with 2 ns for this
    function.
    """
    keep = round((1.0 - p) * KEEP_LEVELS)
    if not training or p == 0.0:
        return x
    if not 0 < keep < KEEP_LEVELS or not x.dim():
        return F.dropout(x, p)
    # An input of its own for each mask: the compiler takes equal nodes for one (but those that make memory),
    # and two dropouts of one tensor would drop the same values.
    memory = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    mask = torch.ops.megatron_npu.keep_mask(memory, keep)
    precise = torch.promote_types(x.dtype, torch.float32)
    return (mask.to(precise) * (KEEP_LEVELS / keep) * x).to(x.dtype)


def keep_mask_bits(
    draws: Tensor,
    shape: tuple[int, ...],
    keep: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return a random mask on the CPU whose elements are 1 with probability ``keep / KEEP_LEVELS`` and 0
    otherwise.

    Each 64-bit draw gives four decisions, which is four times as fast as torch's ``bernoulli_``.

    Args:
        draws: int64 scratch memory of at least a quarter of the mask's size; overwritten.
        shape: shape of the mask.
        keep: an integer from 1 to ``KEEP_LEVELS``.
        out: the tensor to write the mask to, of any dtype and of that shape. If None, the mask is int16 and
            uses the memory of ``draws``.
    """
    count = torch.Size(shape).numel()
    bits = draws[: -(-count // 4)].random_(-(1 << 63), None)
    return keep_of_bits(bits, shape, keep, out)


def keep_of_bits(bits: Tensor, shape: tuple[int, ...], keep: int, out: Tensor | None = None) -> Tensor:
    """Convert random bits that were drawn earlier to the mask that ``keep_mask_bits`` would return.

    One int64 provides the bits of four values.
    """
    decisions = bits.view(torch.int16)[: torch.Size(shape).numel()].view(shape)
    return torch.le(decisions, most_of_kept(keep), out=decisions if out is None else out)


def most_of_kept(keep: int) -> int:
    """Return the largest random int16 for which dropout keeps a value.

    A value is kept if its 16 random bits, read as an int16, do not exceed it.
    """
    return keep - KEEP_LEVELS // 2 - 1  # the first beyond would not fit int16 where everything is kept


def _on_gpu(x: Tensor) -> bool:
    """Return True if ``x`` is on a GPU, where the fused operation is useful even for p = 0.

    On a GPU, one kernel adds bias and residual.
    """
    return x.is_cuda


def _needs_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _composed(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """Add the bias, apply dropout and add the residual in separate steps.

    torch's dropout saves a byte per value, torch_npu's a bit.
    """
    value = x if bias is None else x + bias
    return residual + (F.dropout(value, p) if p else value)


def _plain_dropout(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p)


def _mask_in_tiles(like: Tensor, keep: int) -> Tensor:
    mask = torch.empty_like(like)
    draws = torch.empty(_DRAWN_TOGETHER // 4, dtype=torch.int64)
    for tile in mask.view(-1).split(_DRAWN_TOGETHER):
        keep_mask_bits(draws, tile.shape, keep, tile)
    return mask


# The tag: where a graph computes activations again, the partitioner sets the generator back for it. By parts,
# as custom_op of older torch takes no tags.
torch.library.define(
    _KEEP_MASK, "(Tensor like, int keep) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
torch.library.impl(_KEEP_MASK, "cpu", _mask_in_tiles)
torch.library.register_fake(_KEEP_MASK, lambda like, keep: torch.empty_like(like))


_dropout = Operation("dropout", _plain_dropout, draws=lambda *_: True)
_dropout.on("cuda", note="torch's dropout")(_plain_dropout)
_dropout.on("npu", note="torch_npu's dropout")(_plain_dropout)


@_dropout.on("cpu", note="tiles, 16 random bits per value²")
def _dropout_cpu(x: Tensor, p: float) -> Tensor:
    keep = round((1.0 - p) * KEEP_LEVELS)
    return _CpuDropout.apply(x, keep) if 0 < keep < KEEP_LEVELS and x.dim() else F.dropout(x, p)


class _CpuDropout(torch.autograd.Function):
    """Apply dropout on a CPU without bias and residual; see ``_CpuBiasDropoutAdd``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: int) -> Tensor:
        width, scale = x.size(-1), KEEP_LEVELS / keep
        step = _step(width)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = x.reshape(output.numel() // max(1, width), width)
        mask = torch.empty(rows.shape, dtype=torch.int8)
        (buffer,) = scratch_buffers(1, output, torch.promote_types(x.dtype, torch.float32), step)
        draws = torch.empty(-(-buffer.numel() // 4), dtype=torch.int64)
        tiles = (t.split(step) for t in (rows, mask, output.view(rows.shape)))
        for tile, kept, out in zip(*tiles, strict=True):
            decisions = keep_mask_bits(draws, tile.shape, keep)
            kept.copy_(decisions)
            torch.mul(buffer[: tile.size(0)].copy_(decisions).mul_(scale), tile, out=out)
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        step = _step(mask.size(1))
        output = torch.empty_like(grad, memory_format=torch.contiguous_format)
        (buffer,) = scratch_buffers(1, output, torch.promote_types(grad.dtype, torch.float32), step)
        tiles = (t.split(step) for t in (mask, grad.reshape(mask.shape), output.view(mask.shape)))
        for kept, g, out in zip(*tiles, strict=True):
            torch.mul(buffer[: kept.size(0)].copy_(kept).mul_(ctx.scale), g, out=out)
        return output, None


_bias_dropout_add = Operation(
    "bias_dropout_add", _composed, group="dropout", draws=lambda x, bias, residual, p: p > 0.0
)
_bias_dropout_add.on("npu", note="torch_npu's dropout")(_composed)


@_bias_dropout_add.on(
    "cuda", note="one Triton kernel per direction⁶, which stores no mask, else torch's dropout"
)
def _cuda(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    beyond = None
    if residual.shape != x.shape or (bias is not None and bias.shape != x.shape[-1:]):
        beyond = "the shapes of bias and residual do not match the rows"
    if takes_kernel("bias_dropout_add", x, bias, residual, beyond=beyond):
        return BiasDropoutAdd.apply(x, bias, residual, p)
    return _composed(x, bias, residual, p)


@_bias_dropout_add.on("cpu", note="tiles, 16 random bits per value²")
def _cpu(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """Compute ``bias_dropout_add`` on a CPU, with 1 - p rounded to a multiple of 2^-16.

    The scale uses the rounded value, so that the result is unbiased.
    """
    keep = round((1.0 - p) * KEEP_LEVELS)
    plain_bias = bias is None or bias.shape == x.shape[-1:]
    if not 0 < keep < KEEP_LEVELS or not plain_bias or residual.shape != x.shape:
        return _composed(x, bias, residual, p)
    return _CpuBiasDropoutAdd.apply(x, bias, residual, keep)


class _CpuBiasDropoutAdd(torch.autograd.Function):
    """Add the bias, apply dropout and add the residual in cache-sized tiles, with a mask from
    ``keep_mask_bits``.

    Otherwise, Megatron spends most of the time of this step in torch's ``bernoulli_``, which draws 64 bits or
    more for each value, one value at a time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, keep: int) -> Tensor:
        rows, width = x.reshape(-1, x.size(-1)), x.size(-1)
        step = _step(width)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        mask = torch.empty(rows.shape, dtype=torch.int8)
        precise = torch.promote_types(x.dtype, torch.float32)
        shift = torch.zeros(width, dtype=precise) if bias is None else bias.to(precise)
        buffers = scratch_buffers(2, output, precise, step)
        draws = torch.empty(-(-buffers[0].numel() // 4), dtype=torch.int64)
        halves = (t.reshape(rows.shape).split(step) for t in (residual, output))
        for tile, kept, rest, out in zip(rows.split(step), mask.split(step), *halves, strict=True):
            value, factor = (buffer[: tile.size(0)] for buffer in buffers)
            factor = out if out.dtype is precise else factor
            torch.add(shift, tile, out=value)
            decisions = keep_mask_bits(draws, tile.shape, keep)
            kept.copy_(decisions)
            value.mul_(factor.copy_(decisions))
            torch.add(rest, value, alpha=KEEP_LEVELS / keep, out=out)
        ctx.save_for_backward(mask, bias)
        ctx.scale = KEEP_LEVELS / keep
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        mask, bias = ctx.saved_tensors
        step = _step(grad.size(-1))
        output = torch.empty_like(grad, memory_format=torch.contiguous_format)
        precise = torch.promote_types(grad.dtype, torch.float32)
        d_bias = None if bias is None else torch.zeros(bias.shape, dtype=precise)
        (buffer,) = scratch_buffers(1, output, precise, step)
        flat = (t.reshape(mask.shape).split(step) for t in (grad, output))
        for kept, g, out in zip(mask.split(step), *flat, strict=True):
            factor = buffer[: kept.size(0)].copy_(kept).mul_(ctx.scale)
            product = torch.mul(factor, g, out=out if out.dtype is precise else factor)
            if product is factor:
                out.copy_(product)
            if d_bias is not None:
                d_bias += product.sum(0)
        return output, None if d_bias is None else d_bias.to(bias.dtype), grad, None


def _step(width: int) -> int:
    """Return the number of rows in a tile, a multiple of 4, so that two tiles never share a random draw.

    The mask therefore does not depend on the tile size, which grows with the number of threads.
    """
    return -(-rows_per_tile(width) // 4) * 4
