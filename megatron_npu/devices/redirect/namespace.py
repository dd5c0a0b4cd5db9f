"""Replace names in the module ``torch.cuda``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.redirect import callers

# Questions that torch's own modules ask to find out what hardware there is, and which of them are to ask.
_PROBES = {
    "is_available": callers.PROBE_HARDWARE,
    "device_count": callers.PROBE_HARDWARE,
    "get_device_properties": callers.PROBE_HARDWARE,
    "get_device_capability": callers.PROBE_HARDWARE,
    "get_device_name": callers.PROBE_HARDWARE,
    "current_device": callers.GENERATE_CODE,
    "_lazy_init": callers.START_CUDA,
}
# Names that every run of Megatron uses, and that raise an error in a torch without CUDA.
_REQUIRED = (
    "Event",
    "current_device",
    "device_count",
    "get_rng_state",
    "is_available",
    "manual_seed",
    "max_memory_allocated",
    "set_device",
    "set_rng_state",
    "synchronize",
)


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements that ``device.cuda_namespace`` lists.

    Raises:
        UsageError: it lacks a name without which no run can start.
    """
    names = device.cuda_namespace()
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise UsageError(
            f"{type(device).__name__}.cuda_namespace() must have a replacement for each name of torch.cuda "
            f"that Megatron uses, but it lacks {', '.join(missing)}",
            remedy="Add them; docs/contributing/adding-a-device.md describes this method.",
        )
    for path, value in names.items():
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, torch.cuda)
        if name in _PROBES:
            value = _truthful_to(_PROBES[name], getattr(owner, name), value)
        yield owner, name, _distinct(value)


def _truthful_to(
    asking: callers.Callers, real: Callable[..., Any], redirected: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls ``real`` for the modules in ``asking``, and ``redirected`` for all
    others.
    """

    @functools.wraps(real)
    def probe(*args: Any, **kwargs: Any) -> Any:
        answer = real if callers.caller() in asking else redirected
        return answer(*args, **kwargs)

    return probe


def _distinct(value: Any) -> Any:
    """Return a new function object that calls the given function or method.

    Other values are returned unchanged.

    torch._dynamo stores its rules per function object: if one function had two names in torch.cuda with
    different rules, importing torch._dynamo would fail.
    """
    if isinstance(value, (types.BuiltinMethodType, types.MethodType)):
        return lambda *args, **kwargs: value(*args, **kwargs)
    if not isinstance(value, types.FunctionType):
        return value
    copy = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    return copy
