"""Where else torch is told a device: loading, storages, generators, default types, parallel modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import serialization
from torch.nn.parallel import DistributedDataParallel

from megatron_npu.devices.cuda_types import TensorType

Target = Callable[[Any], Any]


def replacements(device: str, target: Target) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of what gives ``cuda`` the meaning of ``device`` in these places.

    Args:
        device: ``cpu`` or ``npu``.
        target: returns what a device argument stands for, others than of cuda as they are.
    """
    yield serialization, "default_restore_location", _restoring(target)
    yield torch.UntypedStorage, "to", _storage_to(target)
    yield torch, "Generator", _generator_type(target)
    yield torch, "set_default_tensor_type", _default_tensor_type(device)
    yield DistributedDataParallel, "__init__", _parallel(device, target)


def _restoring(target: Target) -> Callable[..., Any]:
    """Every form of ``map_location`` ends here, and the tags of a checkpoint that CUDA has written, too."""
    original = serialization.default_restore_location

    @functools.wraps(original)
    def default_restore_location(storage: Any, location: str) -> Any:
        return original(storage, str(target(location)))

    return default_restore_location


def _storage_to(target: Target) -> Callable[..., Any]:
    """``storage.cuda()``, and that of a typed storage, come here."""
    original = torch.UntypedStorage.to

    @functools.wraps(original)
    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        return original(self, device=target(device), non_blocking=non_blocking)

    return to


def _generator_type(target: Target) -> type:
    """Return what ``torch.Generator`` is meanwhile: it makes torch's own, and they are its instances."""
    original = torch.Generator

    class GeneratorType(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return original(target(device))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    return GeneratorType("Generator", (), {"__doc__": original.__doc__, "__module__": original.__module__})


def _default_tensor_type(device: str) -> Callable[[Any], None]:
    """On an NPU torch takes no type of its tensors: the dtype and the device are set, each by itself."""
    original = torch.set_default_tensor_type
    has_device = False

    @functools.wraps(original)
    def set_default_tensor_type(t: Any, /) -> None:
        nonlocal has_device
        if isinstance(t, str) and t.startswith("torch.cuda."):
            t = getattr(torch.cuda, t.removeprefix("torch.cuda."))
        if isinstance(t, TensorType):
            torch.set_default_dtype(t.dtype)
        else:
            original(t)
        if device != "cpu" and has_device != isinstance(t, TensorType):
            has_device = not has_device
            torch.set_default_device(device if has_device else None)

    return set_default_tensor_type


def _parallel(device: str, target: Target) -> Callable[..., None]:
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def initialise(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if device == "cpu":  # torch takes no index of a CPU, and there is one
            device_ids = output_device = None
        elif device_ids is not None:
            device_ids, output_device = [target(one) for one in device_ids], target(output_device)
        original(self, module, device_ids, output_device, *args, **kwargs)

    return initialise
