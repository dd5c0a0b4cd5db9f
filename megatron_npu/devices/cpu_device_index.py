"""Define the type of the object that ``torch.cuda.current_device()`` returns on a CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch


def _on_index(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a method that behaves as in ``int`` and overrides the method inherited from ``str``."""

    def method(self: CpuDeviceIndex, other: Any) -> Any:
        return operation(int(self), int(other) if isinstance(other, CpuDeviceIndex) else other)

    return method


def _on_index_reflected(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return _on_index(lambda index, other: operation(other, index))


class CpuDeviceIndex(str):
    """An object that Python code treats as an integer index and torch treats as the device name ``cpu``.

    On CUDA the result is an int, and Megatron uses it in every way that an int allows. An int does not work
    here, because torch without CUDA has no numbered devices. A ``torch.device`` does not work either, because
    it is neither a number nor usable in the name ``cuda:0``. torch reads the *characters* of a ``str``, which
    are ``cpu``; every operation in Python uses the index.

    | use, in core 0.16.1 unless stated otherwise | where (among others) |
    |---|---|
    | ``torch.empty(..., device=i)``, 150 times; ``x.to(i)``, ``x.cuda(i)``, ``module.cuda(i)`` | everywhere |
    | ``with torch.device(i)``, ``torch.device(i)`` | ``YarnRotaryEmbedding``, ``nccl_allocator`` |
    | ``torch.device("cuda", i)`` | ``nccl_allocator``, Megatron-FSDP |
    | ``f"cuda:{i}"``, ``torch.device(f"cuda:{i}")`` | ``DynamicInferenceEngine``, Megatron-FSDP |
    | ``torch.cuda.default_generators[i]``, an index and a key | ``tensor_parallel.random``, Megatron-FSDP |
    | ``int(i)``, ``i == j``, ``f"device {i}"`` | ``rl_utils``, ``RerunStateMachine`` |
    | ``torch.cuda.set_device(i)``, ``get_device_name(i)`` | ``StaticInferenceEngine``; any script |
    | ``device_ids=[i]`` of a barrier or a ``DistributedDataParallel`` | ``parallel_state``; 285068c8 |
    | kept in a checkpoint, copied with a configuration | ``RerunStateMachine.suspicious_device`` |
    | ``i + 1``, ``i % 2``, ``i < 4`` | scripts that place their processes by it |

    tests/unit/devices/test_cpu_device_index.py tests each of these uses.

    Args:
        index: the device's index.
    """

    _index: int

    def __new__(cls, index: int) -> CpuDeviceIndex:
        self = super().__new__(cls, "cpu")
        self._index = index
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple = (), options: Any = None) -> Any:
        """Handle ``torch.device("cuda", index)``, the only function for which torch consults this object."""
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

    def __hash__(self) -> int:
        return hash(self._index)

    def __bool__(self) -> bool:
        return bool(self._index)

    __eq__, __ne__ = _on_index(operator.eq), _on_index(operator.ne)
    __lt__, __le__ = _on_index(operator.lt), _on_index(operator.le)
    __gt__, __ge__ = _on_index(operator.gt), _on_index(operator.ge)
    __add__, __radd__ = _on_index(operator.add), _on_index_reflected(operator.add)
    __sub__, __rsub__ = _on_index(operator.sub), _on_index_reflected(operator.sub)
    __mul__, __rmul__ = _on_index(operator.mul), _on_index_reflected(operator.mul)
    __mod__, __rmod__ = _on_index(operator.mod), _on_index_reflected(operator.mod)
    __floordiv__, __rfloordiv__ = _on_index(operator.floordiv), _on_index_reflected(operator.floordiv)

    def __deepcopy__(self, memo: dict) -> CpuDeviceIndex:
        return self

    def __reduce__(self) -> tuple:
        # What a checkpoint keeps must load without this package, and with torch.load's weights_only.
        return torch.device, ("cpu",)
