"""Replace the functions that rotate queries and keys in Transformers layers.

The rotation function of a model's file is recognized by its results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_npu import devices
from megatron_npu.ops.rotary import rotary_by_tables
from megatron_npu.ops.swapping.found import Found, Left, Replacement, agrees, names_in_forward

Rotate = Callable[..., Any]


def recognise(module: nn.Module) -> Found:
    """Return the forward method of a layer, changed to rotate queries and keys with our function."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        return None
    for name in sorted(names_in_forward(module)):
        function = inspect.unwrap(forward).__globals__.get(name)
        if callable(function) and _takes_tables(function):
            if not turns_halves(function):
                return Left(
                    "rotary", f"{name} computes something other than a rotary embedding of the two halves"
                )
            changed = _with_our_rotary(forward, name, function)
            if changed is None:
                return Left("rotary", "its forward is wrapped by a function with a different call signature")
            return Replacement("rotary", "rotary", changed)
    return None


def _takes_tables(function: Rotate) -> bool:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a builtin
        return False
    return names[:4] == ["q", "k", "cos", "sin"]


@functools.lru_cache(maxsize=64)  # a function serves all layers
def turns_halves(function: Rotate) -> bool:
    """Return True if a test shows that ``function(q, k, cos, sin)`` rotates element i together with
    element i + d/2.
    """
    draw = functools.partial(
        torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    q, k = (draw(2, heads, 3, 8) for heads in (2, 1))
    half = draw(2, 3, 4)
    cos, sin = (torch.cat((f(half), f(half)), -1) for f in (torch.cos, torch.sin))
    try:
        turned = function(q, k, cos, sin)
        expected = [_formula(x, cos[:, None], sin[:, None]) for x in (q, k)]
        return all(agrees(a, b, 1e-5) for a, b in zip(turned, expected, strict=True))
    except Exception:  # it wants more than these four, or tables of another shape
        return False


def _formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@functools.lru_cache(maxsize=64)
def _with_our_rotary(forward: FunctionType, name: str, theirs: Rotate) -> FunctionType | None:
    """Return a copy of ``forward`` that calls our function for the rotation.

    Other globals do not change.

    Wrappers around it (Transformers 5.24 renames arguments with one) are copied too. The result is None if
    one of them does not have the wrapped function in its closure, so that no copy of it would call ours.
    """
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is not None:
        return _around(forward, wrapped, _with_our_rotary(wrapped, name, theirs))

    def turn(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, unsqueeze_dim: int = 1, **others: Any
    ) -> tuple[Tensor, Tensor]:
        elsewhere = torch.compiler.is_compiling() or q.device.type != devices.current().name
        if elsewhere or args or others or unsqueeze_dim not in (1, 2) or q.dim() != 4 or cos.dim() != 3:
            return theirs(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **others)
        return _by_tables(q, cos, sin, unsqueeze_dim), _by_tables(k, cos, sin, unsqueeze_dim)

    return _copy(forward, {**forward.__globals__, name: turn}, forward.__closure__)


def _around(wrapper: FunctionType, wrapped: FunctionType, ours: FunctionType | None) -> FunctionType | None:
    """Return a copy of ``wrapper`` that calls our function instead of the function that it wraps, or None."""
    cells = wrapper.__closure__ or ()
    if ours is None or not any(_holds(cell, wrapped) for cell in cells):
        return None
    changed = _copy(
        wrapper,
        wrapper.__globals__,
        tuple(CellType(ours) if _holds(cell, wrapped) else cell for cell in cells),
    )
    functools.update_wrapper(changed, ours)
    return changed


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _copy(
    function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Return a function with the same code, but with other globals and another closure."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _by_tables(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotate ``[b, n, s, d]`` (``heads`` 1) or ``[b, s, n, d]`` (``heads`` 2) with tables ``[b or 1, s, r]``.

    Queries and keys are views of ``[b, s, n, d]``, which the operation takes and returns.
    """
    tables = (cos.unsqueeze(2), sin.unsqueeze(2))
    if heads == 2:
        return rotary_by_tables(x, *tables)
    return rotary_by_tables(x.transpose(1, 2), *tables).transpose(1, 2)
