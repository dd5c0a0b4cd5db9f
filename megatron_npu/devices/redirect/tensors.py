"""Where a tensor or module is, and where it is moved to: ``to``, ``cuda``, ``type``, ``is_cuda``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.cuda_types import TensorType
from megatron_npu.devices.device_names import Target, target_on
from megatron_npu.devices.redirect import callers


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the methods of ``torch.Tensor`` and ``torch.nn.Module``."""
    target, tensor_to = target_on(device), torch.Tensor.to
    for owner in (torch.Tensor, torch.nn.Module):
        original_to = owner.to
        yield owner, "to", _to(original_to, target)
        yield owner, "cuda", _cuda(original_to, target)
    yield torch.Tensor, "type", _type(device, tensor_to)
    yield torch.Tensor, "is_cuda", property(_is_cuda_on(device))
    if device.is_host:
        yield torch.Tensor, "pin_memory", lambda self, device=None: self
        yield torch.Tensor, "record_stream", lambda self, stream: None


def _to(original: Callable[..., Any], target: Target) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (target(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = target(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _cuda(original_to: Callable[..., Any], target: Target) -> Callable[..., Any]:
    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original_to(self, target("cuda" if device is None else device))

    return cuda


def _type(device: Device, original_to: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Tensor.type``, which takes the types of torch.cuda, and names them to Megatron."""
    original = torch.Tensor.type
    types_prefix = "torch." if device.is_host else f"torch.{device.name}."

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, TensorType):
            return original_to(self, device=dtype.device, dtype=dtype.dtype)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", types_prefix)
        answer = original(self, dtype, *args, **kwargs)
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
        return not (device.is_host and caller in callers.OFFLOAD_TO_CPU)

    return is_cuda
