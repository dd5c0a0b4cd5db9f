"""What ``torch.cuda.current_device()`` answers where the CPU is the device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch


class CpuDeviceIndex(str):
    """An index to Python, the name ``cpu`` to torch.

    On CUDA the answer is an int, and Megatron uses it in every way that an int allows: some two hundred times
    as ``device=``, but also as ``torch.device(i)``, ``torch.device("cuda", i)``, ``f"cuda:{i}"``, as a number
    and as an index into a list. An int does for all but the first two: torch built without CUDA has no device
    with a number. A ``torch.device`` does for the first two only. Of a ``str`` torch reads the *characters*;
    all that Python reads of this one is the index.

    Args:
        index: the number of the device.
    """

    _index: int

    def __new__(cls, index: int) -> CpuDeviceIndex:
        self = super().__new__(cls, "cpu")
        self._index = index
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple = (), options: Any = None) -> Any:
        """Answer ``torch.device("cuda", index)``, the one call for which torch asks."""
        return torch.device("cpu") if function is torch.device else NotImplemented

    def __index__(self) -> int:
        return self._index

    def __int__(self) -> int:
        return self._index

    def __str__(self) -> str:
        return str(self._index)

    __repr__ = __str__

    def __format__(self, specification: str) -> str:
        return format(self._index, specification)

    def __eq__(self, other: object) -> bool:
        return self._index == (other._index if isinstance(other, CpuDeviceIndex) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other  # str has a __ne__ of its own

    def __hash__(self) -> int:
        return hash(self._index)

    def __bool__(self) -> bool:
        return bool(self._index)

    def __deepcopy__(self, memo: dict) -> CpuDeviceIndex:
        return self

    def __reduce__(self) -> tuple:
        # What a checkpoint keeps must load without this package, and with torch.load's weights_only.
        return torch.device, ("cpu",)


def _as_number(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does with the index what Python does with an int; str has its own of some."""

    def method(self: CpuDeviceIndex, other: Any) -> Any:
        return operation(self._index, other._index if isinstance(other, CpuDeviceIndex) else other)

    return method


for _name in ("add", "sub", "mul", "mod", "floordiv", "lt", "le", "gt", "ge"):
    _operation = getattr(operator, _name)
    setattr(CpuDeviceIndex, f"__{_name}__", _as_number(_operation))
    if _name not in ("lt", "le", "gt", "ge"):  # Python mirrors comparisons by itself
        setattr(
            CpuDeviceIndex, f"__r{_name}__", _as_number(lambda a, b, operation=_operation: operation(b, a))
        )
