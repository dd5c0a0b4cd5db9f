"""Redirect the methods ``to``, ``cuda``, ``type`` and ``is_cuda`` of tensors and modules, which query or
change the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.cuda_types import TensorType
from megatron_npu.devices.device_names import Target, means_cuda, target_on
from megatron_npu.devices.redirect import callers


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements for methods of ``torch.Tensor`` and ``torch.nn.Module``."""
    target, tensor_to = target_on(device), torch.Tensor.to
    for owner, private in ((torch.Tensor, _private_tensor), (torch.nn.Module, _private_module)):
        original_to = owner.to
        to_device = _then(original_to, private) if device.is_host else original_to
        yield owner, "to", _to(original_to, to_device, target)
        yield owner, "cuda", (_tensor_cuda if owner is torch.Tensor else _module_cuda)(to_device, target)
    yield torch.Tensor, "type", _type(device, tensor_to)
    yield torch.Tensor, "is_cuda", property(_is_cuda_on(device))
    if device.is_host:
        yield torch.Tensor, "pin_memory", lambda self, device=None: self
        yield torch.Tensor, "record_stream", lambda self, stream: None


def _to(original: Callable[..., Any], to_device: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """Return a replacement for ``to`` that calls ``to_device`` if the arguments refer to CUDA."""

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = args[0] if args else kwargs.get("device")
        if args:
            args = (target(named), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = target(named)
        return (to_device if means_cuda(named) else original)(self, *args, **kwargs)

    return to


def _tensor_cuda(to_device: Callable[..., Any], target: Target) -> Callable[..., Any]:
    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        *,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        there = target("cuda" if device is None else device)
        return to_device(self, there, non_blocking=non_blocking, memory_format=memory_format)

    return cuda


def _module_cuda(to_device: Callable[..., Any], target: Target) -> Callable[..., Any]:
    def cuda(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
        return to_device(self, target("cuda" if device is None else device))

    return cuda


def _then(original: Callable[..., Any], then: Callable[[Any], Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        return then(original(*args, **kwargs))

    return both


def _private_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in private memory if it is in shared memory.

    On CUDA, ``to`` always copies out of shared memory.

    ``torch.multiprocessing`` passes tensors to other processes in shared memory. Without the copy, all ranks
    of ``mp.spawn(train, args=(model,))`` would train the same weights.
    """
    return tensor.clone() if not torch.compiler.is_compiling() and _is_shared(tensor) else tensor


def _private_module(module: torch.nn.Module) -> torch.nn.Module:
    # Megatron's DDP has a list of its own under the name ``buffers``
    buffers = torch.nn.Module.buffers(module)
    shared = any(map(_is_shared, itertools.chain(module.parameters(), buffers)))
    return module._apply(_private_tensor) if shared else module


def _is_shared(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # others need not have one storage
    return plain and tensor.device.type == "cpu" and tensor.is_shared()


def _type(device: Device, original_to: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``Tensor.type`` that accepts and, for Megatron, returns the tensor types of torch.cuda."""
    original = torch.Tensor.type
    types_prefix = "torch." if device.is_host else f"torch.{device.name}."

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if isinstance(dtype, TensorType):
            return original_to(
                self, device=dtype.device, dtype=dtype.dtype, non_blocking=non_blocking, **kwargs
            )
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", types_prefix)
        answer = original(self, dtype, non_blocking, **kwargs)
        is_name = isinstance(answer, str) and self.device.type == device.name
        if is_name and callers.caller() in callers.SEE_CUDA_TENSORS:
            return "torch.cuda." + answer.rsplit(".", 1)[-1]
        return answer

    return type_


def _is_cuda_on(device: Device) -> Callable[[torch.Tensor], bool]:
    def is_cuda(tensor: torch.Tensor) -> bool:
        kind, caller = tensor.device.type, callers.caller()
        if kind != device.name or caller not in callers.SEE_CUDA_TENSORS:
            return kind == "cuda"
        return not (device.is_host and caller in callers.SEE_HOST_TENSORS)

    return is_cuda
