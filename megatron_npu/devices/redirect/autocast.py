"""Redirect autocast for ``"cuda"``, and the functions that read and set its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode

from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.device_names import names_cuda

_Translate = Callable[[Any], Any]  # from a device type to the one that it means here


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements that map autocast for ``cuda`` to ``device``.

    ``torch.amp.custom_fwd`` and ``custom_bwd`` require no replacement, because they look these names up when
    they are called. Functions that were decorated before the redirection therefore use it, and those
    decorated during the redirection stop using it when it ends. Megatron's linear layers are such functions
    (``LinearWithGradAccumulationAndAsyncCommunication``).

    Without a dtype, autocast uses the default of ``device``: bfloat16 on the CPU, float16 elsewhere.
    """
    here = device.name

    def translate(device_type: Any) -> Any:
        if device_type == "cuda":  # every linear layer asks a dozen times
            return here
        return here if isinstance(device_type, str) and names_cuda(device_type) else device_type

    yield torch.autocast, "__init__", _autocast_initializer(translate)
    yield torch.amp.GradScaler, "__init__", _scaler_initializer(translate)
    yield from ((torch, name, value) for name, value in _state_functions(here, translate).items())

    cast = autocast_mode._cast

    @functools.wraps(cast)
    def cast_on_device(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, translate(device_type), dtype)

    yield autocast_mode, "_cast", cast_on_device


def _state_functions(here: str, translate: _Translate) -> dict[str, Any]:
    """Return torch's functions that read and set the state of autocast.

    Their default device is CUDA.
    """
    is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled(translate(device_type))

    def set_autocast_enabled(device_type: Any = "cuda", enabled: Any = None) -> None:
        if enabled is None:  # the older form: set_autocast_enabled(True)
            device_type, enabled = "cuda", device_type
        set_enabled(translate(device_type), enabled)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return get_dtype(translate(device_type))

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(translate(device_type), dtype)

    def get_autocast_gpu_dtype() -> torch.dtype:
        return get_dtype(here)

    def set_autocast_gpu_dtype(dtype: torch.dtype) -> None:
        set_dtype(here, dtype)

    constants: tuple[Any, ...] = (is_autocast_enabled, get_autocast_dtype, get_autocast_gpu_dtype)
    for function in constants:
        # torch.compile takes torch's own functions as constants too, and guards the state that they read;
        # it knows those by object. (The mark of torch.compiler.assume_constant_result, whose import is slow.)
        function._dynamo_marked_constant = True
    setters: tuple[Any, ...] = (set_autocast_enabled, set_autocast_dtype, set_autocast_gpu_dtype)
    return {function.__name__: function for function in constants + setters}


def _autocast_initializer(translate: _Translate) -> Callable[..., None]:
    original = torch.autocast.__init__

    @functools.wraps(original)
    def initialize(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        original(self, translate(device_type), *args, **kwargs)

    return initialize


def _scaler_initializer(translate: _Translate) -> Callable[..., None]:
    original = torch.amp.GradScaler.__init__

    @functools.wraps(original)
    def initialize(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, translate(device), *args, **kwargs)

    return initialize
