"""The mechanism of the limits: what one says about an argument, and the error when it does not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class LimitError(RuntimeError):
    """An argument violates a limit in Ascend's documentation; a RuntimeError, as torch_npu raises.

    Args:
        message: operation, argument, given, allowed and source.
        limit: the violated limit.
    """

    def __init__(self, message: str, limit: Limit) -> None:
        super().__init__(message)
        self.limit = limit


class NotSimulatedError(LimitError, NotImplementedError):
    """An argument that hardware takes and the simulator does not."""


@dataclass(frozen=True)
class Limit:
    """One condition on one argument.

    Attributes:
        argument: its name in the operation's schema.
        allowed: what the documentation allows, in words; part of the message and of the generated page.
        holds: the condition, of all arguments as attributes. It is not asked when the argument is None,
            unless ``even_none``; earlier limits of the same operation hold when it is asked.
        even_none: ask also when the argument is None.
        simulated: False where hardware would take the argument and only the simulator does not.
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
        source: the document and section they come from.
        limits: the conditions.
        notes: what is documented but cannot be checked, or what documents contradict each other about.
    """

    source: str
    limits: tuple[Limit, ...]
    notes: str = ""


def check(operation: str, table: Limits, arguments: Mapping[str, Any]) -> None:
    """Raise for the first violated limit: operation, argument, given, allowed, source.

    Raises:
        LimitError: an argument the documentation does not allow.
        NotSimulatedError: an argument hardware takes and the simulator does not.
    """
    given = SimpleNamespace(**arguments)
    for limit in table.limits:
        value = arguments[limit.argument]
        if (value is None and not limit.even_none) or limit.holds(given):
            continue
        what = f"{operation}: {limit.argument}: given {describe(value)}, "
        if not limit.simulated:
            raise NotSimulatedError(f"{what}the simulator takes only {limit.allowed}", limit)
        raise LimitError(f"{what}allowed {limit.allowed} ({table.source})", limit)


def describe(value: Any) -> str:
    """Return the text for a value in an error message: of a tensor its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{_dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return f"[{', '.join(describe(tensor) for tensor in value)}]"
    return repr(value)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the conditions that come back at every operation ---


def dtype(argument: str, *allowed: torch.dtype) -> Limit:
    """The tensor, or every tensor of the list, has one of these dtypes."""
    names = ", ".join(_dtype_name(each) for each in allowed)
    return Limit(argument, f"dtype {names}", lambda a: all(t.dtype in allowed for t in _tensors(a, argument)))


def dtype_of(argument: str, other: str) -> Limit:
    """The tensor has the dtype of another one."""
    return Limit(
        argument,
        f"the dtype of {other}",
        lambda a: {t.dtype for t in _tensors(a, argument)} <= {t.dtype for t in _tensors(a, other)},
    )


def shape_of(argument: str, other: str) -> Limit:
    """The tensor has the shape of another one."""
    return Limit(
        argument, f"the shape of {other}", lambda a: getattr(a, argument).shape == getattr(a, other).shape
    )


def dimensions(argument: str, least: int, most: int | None = None) -> Limit:
    """The tensor, or every tensor of the list, has between ``least`` and ``most`` dimensions."""
    most = least if most is None else most
    allowed = f"{least} dimensions" if least == most else f"{least} to {most} dimensions"
    return Limit(argument, allowed, lambda a: all(least <= t.dim() <= most for t in _tensors(a, argument)))


def one_of(argument: str, *allowed: Any) -> Limit:
    """The value is one of these."""
    names = " or ".join(repr(each) for each in allowed)
    return Limit(argument, names, lambda a: getattr(a, argument) in allowed)


def between(argument: str, least: float, most: float) -> Limit:
    """``least <= value <= most``."""
    return Limit(argument, f"{least} to {most}", lambda a: least <= getattr(a, argument) <= most)


def absent(argument: str) -> Limit:
    """The documentation reserves the argument or says that it is not supported."""
    return Limit(argument, "only None", lambda a: False)


def not_simulated(argument: str, *taken: Any) -> Limit:
    """Hardware takes other values; the simulator takes None and these."""
    names = " or ".join(repr(each) for each in (None, *taken))
    return Limit(argument, names, lambda a: getattr(a, argument) in taken, simulated=False)


def required(argument: str) -> Limit:
    """The argument is optional in the schema and yet needed."""
    return Limit(argument, "a value", lambda a: getattr(a, argument) is not None, even_none=True)


def _tensors(arguments: SimpleNamespace, name: str) -> list[Tensor]:
    value = getattr(arguments, name)
    return [value] if isinstance(value, Tensor) else list(value)
