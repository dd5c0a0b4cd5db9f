"""Define conditions on the arguments of operations, and the errors that are raised if they are violated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class LimitError(RuntimeError):
    """Raised when an argument violates a limit in Ascend's documentation.

    This is a RuntimeError, because that is what torch_npu raises.

    Args:
        message: the operation, the argument, the given and allowed values, and the source.
        limit: the violated limit.
    """

    def __init__(self, message: str, limit: Limit) -> None:
        super().__init__(message)
        self.limit = limit


class NotSimulatedError(LimitError, NotImplementedError):
    """Raised when an argument is valid on hardware but not supported by the simulator."""


@dataclass(frozen=True)
class Limit:
    """A condition on one argument of an operation.

    Attributes:
        argument: its name in the operation's schema.
        allowed: what the documentation allows, in words; part of the error message and of the generated page.
        holds: the condition, called with all arguments as attributes. It is skipped if the argument is None,
            unless ``even_none`` is set; earlier limits of the same operation hold when it is called.
        even_none: whether to check the condition even if the argument is None.
        simulated: False if hardware accepts the argument and only the simulator does not.
    """

    argument: str
    allowed: str
    holds: Callable[[SimpleNamespace], bool]
    even_none: bool = False
    simulated: bool = True


@dataclass(frozen=True)
class Limits:
    """The limits of one operation, in the order in which they are checked.

    Attributes:
        source: the document and section that specify them.
        limits: the conditions.
        notes: documented conditions that cannot be checked, and contradictions between documents.
    """

    source: str
    limits: tuple[Limit, ...]
    notes: str = ""


def check(operation: str, table: Limits, arguments: Mapping[str, Any]) -> None:
    """Raise an error for the first violated limit.

    The error names the operation, the argument, the given and allowed values, and the source.

    Raises:
        LimitError: the documentation does not allow an argument.
        NotSimulatedError: hardware accepts an argument that the simulator does not support.
    """
    given = SimpleNamespace(**arguments)
    for limit in table.limits:
        value = arguments[limit.argument]
        if (value is None and not limit.even_none) or limit.holds(given):
            continue
        what = f"{operation}: {limit.argument} is {describe(value)}, but "
        if not limit.simulated:
            raise NotSimulatedError(f"{what}the simulator supports only {limit.allowed}", limit)
        raise LimitError(f"{what}the documentation requires {limit.allowed} ({table.source})", limit)


def describe(value: Any) -> str:
    """Format a value for error messages.

    A tensor is described by its dtype and shape.
    """
    if isinstance(value, Tensor):
        return f"{_dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return f"[{', '.join(describe(tensor) for tensor in value)}]"
    return repr(value)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the conditions that come back at every operation ---


def dtype(argument: str, *allowed: torch.dtype) -> Limit:
    """Require that the tensor, or every tensor in a list, has one of the given dtypes."""
    names = ", ".join(_dtype_name(each) for each in allowed)
    return Limit(argument, f"dtype {names}", lambda a: all(t.dtype in allowed for t in _tensors(a, argument)))


def dtype_of(argument: str, other: str) -> Limit:
    """Require that the tensor has the same dtype as another argument."""
    return Limit(
        argument,
        f"the dtype of {other}",
        lambda a: {t.dtype for t in _tensors(a, argument)} <= {t.dtype for t in _tensors(a, other)},
    )


def shape_of(argument: str, other: str) -> Limit:
    """Require that the tensor has the same shape as another argument."""
    return Limit(
        argument, f"the shape of {other}", lambda a: getattr(a, argument).shape == getattr(a, other).shape
    )


def dimensions(argument: str, least: int, most: int | None = None) -> Limit:
    """Require that the tensor, or every tensor in a list, has ``least`` to ``most`` dimensions."""
    most = least if most is None else most
    allowed = f"{least} dimensions" if least == most else f"{least} to {most} dimensions"
    return Limit(argument, allowed, lambda a: all(least <= t.dim() <= most for t in _tensors(a, argument)))


def one_of(argument: str, *allowed: Any) -> Limit:
    """Require that the value is one of the given values."""
    names = " or ".join(repr(each) for each in allowed)
    return Limit(argument, names, lambda a: getattr(a, argument) in allowed)


def between(argument: str, least: float, most: float) -> Limit:
    """Require that ``least <= value <= most``."""
    return Limit(argument, f"{least} to {most}", lambda a: least <= getattr(a, argument) <= most)


def absent(argument: str) -> Limit:
    """Require that the value is None, because the documentation reserves the argument or does not support
    it.
    """
    return Limit(argument, "None", lambda a: False)


def not_simulated(argument: str, *taken: Any) -> Limit:
    """Require that the value is None or one of the given values, because the simulator does not support
    others.

    Hardware accepts other values, but the simulator does not.
    """
    names = " or ".join(repr(each) for each in (None, *taken))
    return Limit(argument, names, lambda a: getattr(a, argument) in taken, simulated=False)


def required(argument: str) -> Limit:
    """Require a value for an argument that the schema declares optional but the operation needs."""
    return Limit(argument, "a value", lambda a: getattr(a, argument) is not None, even_none=True)


def _tensors(arguments: SimpleNamespace, name: str) -> list[Tensor]:
    value = getattr(arguments, name)
    return [value] if isinstance(value, Tensor) else list(value)
