"""Redirect the device arguments of those torch functions that no other module in this folder redirects.

Such functions concern loading, storages, generators, default tensor types, meshes and DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import serialization
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.cuda_types import TensorType
from megatron_npu.devices.device_names import Target, means_cuda, target_on


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements for functions with device arguments."""
    target = target_on(device)
    yield serialization, "default_restore_location", _restore_location(target)
    yield torch.UntypedStorage, "to", _storage_to(target)
    yield torch, "Generator", _generator_type(target)
    yield torch, "set_default_tensor_type", _default_tensor_type(device)
    yield DeviceMesh, "__init__", _mesh_initializer(device)
    yield DistributedDataParallel, "__init__", _ddp_initializer(device, target)


def _restore_location(target: Target) -> Callable[..., Any]:
    """Return a replacement for torch's function that restores storages, which maps CUDA locations to this
    device.

    The replacement applies to any ``map_location`` and to the tags in CUDA checkpoints.
    """
    original = serialization.default_restore_location

    @functools.wraps(original)
    def default_restore_location(storage: Any, location: str) -> Any:
        return original(storage, str(target(location)))

    return default_restore_location


def _storage_to(target: Target) -> Callable[..., Any]:
    """Return a replacement for ``UntypedStorage.to``, which ``storage.cuda()`` calls for all storage
    types.
    """
    original = torch.UntypedStorage.to

    @functools.wraps(original)
    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        return original(self, device=target(device), non_blocking=non_blocking)

    return to


def _generator_type(target: Target) -> type:
    """Return a replacement for ``torch.Generator`` whose instances are torch's own generators."""
    original = torch.Generator

    class GeneratorType(type):
        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return original(target(device))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    return GeneratorType("Generator", (), {"__doc__": original.__doc__, "__module__": original.__module__})


def _default_tensor_type(device: Device) -> Callable[[Any], None]:
    """Return a function that sets the default tensor type by setting its dtype and device separately.

    torch has no NPU tensor types for this purpose.
    """
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
        if not device.is_host and has_device != isinstance(t, TensorType):
            has_device = not has_device
            torch.set_default_device(device.name if has_device else None)

    return set_default_tensor_type


def _mesh_initializer(device: Device) -> Callable[..., None]:
    original = DeviceMesh.__init__

    @functools.wraps(original)
    def initialize(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, device.name if means_cuda(device_type) else device_type, *args, **kwargs)

    return initialize


def _ddp_initializer(device: Device, target: Target) -> Callable[..., None]:
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def initialize(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if device.is_host:  # torch wants no device_ids for modules on the CPU
            device_ids = output_device = None
        elif device_ids is not None:
            device_ids, output_device = [target(one) for one in device_ids], target(output_device)
        original(self, module, device_ids, output_device, *args, **kwargs)

    return initialize
