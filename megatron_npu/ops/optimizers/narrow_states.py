"""Store optimizer states in 16 bits, and update them in fp32, one block of parameters at a time.

Parameters are split or grouped into blocks, so that only one block at a time exists in fp32, and each block
takes one call per kernel, however many tensors it consists of:

- fp32 is updated in place; bf16 is widened and rounded back;
- fp16 is stored divided by a per-tensor scale, so that its largest value is well inside fp16's range;
- a main weight in int16 holds the bits that the bf16 weight lacks (``remainders``). One more bit is stored
    in the sign of the second moment, which is never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_npu.ops.optimizers import remainders

BLOCK = 1 << 22  # numbers: at four bytes for weight, gradient and both moments, 64 MiB

# Largest number of an fp16 state: what a step adds must not overflow before the scale is taken again.
_FP16_RANGE = 65504 / 2  # of fp16; torch is not asked, as it need not be there when this is imported

# As integers, floating-point numbers with a minus sign lie between that of -0 and this; NaN above.
_MINUS_INFINITY = {torch.float32: -0x800000, torch.bfloat16: -0x80, torch.float16: -0x400}

# Weights, gradients, first and second moments (fp32 lists, the same order) -> updated in place.
Update = Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor]], None]


@dataclass(frozen=True)
class Row:
    """A parameter with its gradient and optimizer states, which all have the same shape.

    Attributes:
        weight, grad: the model's weight and its gradient.
        first, second: the moments.
        main: the main weight, its remainder (int16), or the weight itself if there is no main weight.
        scales: scales of ``first``, ``second`` and ``main``, fp32 ``[]`` each; empty if none of them is fp16.
    """

    weight: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    main: Tensor
    scales: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the row other than the scales."""
        return self.weight, self.grad, self.first, self.second, self.main


def update_in_blocks(rows: Iterable[Row], update: Update) -> None:
    """Update rows of parameters and states in place, one block of values at a time.

    All rows of a block have the same dtypes.

    A row that is larger than a block is split, unless it is scaled: its scale is known only after all of it
    has been updated.
    """
    bunches: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        bunches.setdefault((row.weight.device, *(t.dtype for t in row.tensors)), []).append(row)
    for bunch in bunches.values():
        for block in _blocks(bunch):
            _update_block(block, update)


def _blocks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    block: list[Row] = []
    size = 0
    for row in rows:
        if size and size + row.weight.numel() > BLOCK:
            yield block
            block, size = [], 0
        if row.weight.numel() > BLOCK and not row.scales:
            yield from ([piece] for piece in _cut(row))
        else:
            block.append(row)
            size += row.weight.numel()
    if block:
        yield block


def _cut(row: Row) -> Iterator[Row]:
    """Split a large row of tensors into pieces, and yield them.

    Pieces that are copies are written back at the end.
    """
    flat = [tensor.reshape(-1) for tensor in row.tensors]
    for pieces in zip(*(tensor.split(BLOCK) for tensor in flat), strict=True):
        yield Row(*pieces)
    for tensor, copy in zip(row.tensors, flat, strict=True):
        if tensor is not row.grad and tensor.data_ptr() != copy.data_ptr():
            tensor.copy_(copy.view_as(tensor))


def _update_block(rows: Sequence[Row], update: Update) -> None:
    columns = zip(*(row.tensors for row in rows), strict=True)
    weights, grads, first, second, main = (list(column) for column in columns)
    scales = [list(column) for column in zip(*(row.scales for row in rows), strict=True)] or [[], [], []]
    remaindered = main[0].dtype is torch.int16
    wide_main = _join(weights, main, second) if remaindered else _widen(main, scales[2])
    wide_first, wide_second = _widen(first, scales[0]), _widen(second, scales[1])
    update(wide_main, _widen(grads, []), wide_first, wide_second)
    _narrow(first, wide_first, scales[0])
    _narrow(second, wide_second, scales[1])
    if remaindered:
        _split(weights, main, second, wide_main)
    else:
        _narrow(main, wide_main, scales[2])
        if main[0] is not weights[0]:
            torch._foreach_copy_(weights, wide_main)


def _flat(column: list[Tensor]) -> Tensor:
    """Concatenate a list of tensors into one vector.

    A single contiguous tensor is not copied.
    """
    parts = [tensor.reshape(-1) for tensor in column]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shaped(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return views of the vector ``flat`` that have the shapes of the tensors in ``like``."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _widen(column: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    """Return a list of tensors converted to contiguous tensors in fp32 or wider.

    Tensors are copied only if necessary.
    """
    if column[0].dtype.itemsize >= 4 and all(tensor.is_contiguous() for tensor in column):
        return column
    wide = _shaped(_flat(column).to(torch.promote_types(column[0].dtype, torch.float32), copy=True), column)
    if column[0].dtype is torch.float16 and scales:
        torch._foreach_mul_(wide, scales)
    return wide


def _narrow(column: list[Tensor], wide: list[Tensor], scales: list[Tensor]) -> None:
    """Store the tensors that ``_widen`` returned in their original dtypes, and compute new scales.

    ``wide`` is modified.
    """
    if wide is column:
        return
    if column[0].dtype is torch.float16 and scales:
        torch._foreach_copy_(scales, _scales(wide))
        wide = list(torch._foreach_div(wide, scales))
    torch._foreach_copy_(column, wide)


def _scales(wide: list[Tensor]) -> list[Tensor]:
    """Return, for each tensor, the divisor (fp32 ``[]``) that brings its values into the range of fp16.

    It is 1 for zeros.
    """
    scale = torch.stack(torch._foreach_norm(wide, float("inf"))).div_(_FP16_RANGE)
    return list(scale.masked_fill_(scale == 0, 1.0).unbind())


def _flags(second: Tensor) -> Tensor:
    """Return a mask of the second moments that have a minus sign, including -0.

    NaN does not count, because its sign has no meaning.
    """
    whole = second.contiguous().view(torch.int32 if second.dtype is torch.float32 else torch.int16)
    return whole <= _MINUS_INFINITY[second.dtype]


def _join(weights: list[Tensor], main: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """Reconstruct the main weights in fp32, and clear the flags that are stored in the signs of the
    second moments.
    """
    flags = _flags(_flat(second))
    torch._foreach_abs_(second)
    return _shaped(remainders.join(_flat(weights), _flat(main), flags), weights)


def _split(weights: list[Tensor], main: list[Tensor], second: list[Tensor], wide: list[Tensor]) -> None:
    """Store the rounded main weights in the model's weights, and the remainders in ``main``.

    The flags are stored in the second moments.
    """
    rounded, left, flags = remainders.split(_flat(wide))
    torch._foreach_copy_(weights, _shaped(rounded, weights))
    torch._foreach_copy_(main, _shaped(left, weights))
    signs = flags.to(second[0].dtype).mul_(-2).add_(1)
    torch._foreach_mul_(second, _shaped(signs, weights))


def unscaled(row: Row, name: str) -> Tensor:
    """Return the ``first`` moment, the ``second`` moment or the ``main`` weight of a parameter in fp32.

    The result is a copy unless it is already fp32.
    """
    tensor = getattr(row, name)
    if name == "main" and tensor.dtype is torch.int16:
        return remainders.join(row.weight.contiguous(), tensor, _flags(row.second))
    if name == "second" and row.main.dtype is torch.int16:
        return tensor.float().abs()
    index = ("first", "second", "main").index(name)
    (wide,) = _widen([tensor], list(row.scales[index : index + 1]))
    return wide


def set_unscaled(row: Row, name: str, value: Tensor) -> None:
    """Set the ``first`` moment, the ``second`` moment or the ``main`` weight of a parameter from fp32 values.

    Setting the main weight also updates the weight.
    """
    tensor = getattr(row, name)
    if tensor.dtype is torch.int16:
        rounded, left, flag = remainders.split(value.to(torch.float32).contiguous())
        row.weight.copy_(rounded)
        tensor.copy_(left)
        row.second.abs_().mul_(1 - 2 * flag.to(row.second.dtype))
        return
    if name == "second" and row.main.dtype is torch.int16:
        value = value * (1 - 2 * _flags(row.second).to(value.dtype))
    index = ("first", "second", "main").index(name)
    _narrow([tensor], [value.to(torch.float32)], list(row.scales[index : index + 1]))


def is_narrow(row: Row) -> bool:
    """Return True if any optimizer state of a parameter is stored in fewer than 32 bits."""
    return any(tensor.dtype.itemsize < 4 for tensor in (row.first, row.second, row.main))
