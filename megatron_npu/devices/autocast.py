"""Autocast for ``"cuda"``, and what torch answers about it, on a device that is not CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode

from megatron_npu.devices.cuda_types import names_cuda


def replacements(device: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of what makes autocast of ``cuda`` that of ``device``.

    ``torch.amp.custom_fwd`` and ``custom_bwd`` need nothing of their own: they ask by these names when they
    are called, so functions decorated before the redirection follow it, and it ends for those within.
    Megatron's linear layers are such functions (``LinearWithGradAccumulationAndAsyncCommunication``).

    Without a dtype, autocast takes the default of ``device``: bfloat16 on the CPU, float16 on the others.
    """

    def meant(device_type: Any) -> Any:
        if device_type == "cuda":  # every linear layer asks a dozen times
            return device
        return device if isinstance(device_type, str) and names_cuda(device_type) else device_type

    yield torch.autocast, "__init__", _autocast_initialiser(meant)
    yield torch.amp.GradScaler, "__init__", _scaler_initialiser(meant)
    yield from ((torch, name, value) for name, value in _questions(device, meant).items())

    cast = autocast_mode._cast

    @functools.wraps(cast)
    def cast_on_device(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, meant(device_type), dtype)

    yield autocast_mode, "_cast", cast_on_device


def _questions(device: str, meant: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what reads and writes the state of autocast; without a device, torch's own mean CUDA."""
    is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled(meant(device_type))

    def set_autocast_enabled(device_type: Any = "cuda", enabled: Any = None) -> None:
        if enabled is None:  # torch has a second form, which takes the answer alone
            device_type, enabled = "cuda", device_type
        set_enabled(meant(device_type), enabled)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return get_dtype(meant(device_type))

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(meant(device_type), dtype)

    def get_autocast_gpu_dtype() -> torch.dtype:
        return get_dtype(device)

    def set_autocast_gpu_dtype(dtype: torch.dtype) -> None:
        set_dtype(device, dtype)

    constants: tuple[Any, ...] = (is_autocast_enabled, get_autocast_dtype, get_autocast_gpu_dtype)
    for answer in constants:
        # torch.compile takes torch's own answers as constants too, and guards the state that they read;
        # it knows those by object. (The mark of torch.compiler.assume_constant_result, whose import is slow.)
        answer._dynamo_marked_constant = True
    answers: tuple[Any, ...] = (
        is_autocast_enabled,
        set_autocast_enabled,
        get_autocast_dtype,
        set_autocast_dtype,
        get_autocast_gpu_dtype,
        set_autocast_gpu_dtype,
    )
    return {answer.__name__: answer for answer in answers}


def _autocast_initialiser(meant: Callable[[Any], Any]) -> Callable[..., None]:
    original = torch.autocast.__init__

    @functools.wraps(original)
    def initialise(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        original(self, meant(device_type), *args, **kwargs)

    return initialise


def _scaler_initialiser(meant: Callable[[Any], Any]) -> Callable[..., None]:
    original = torch.amp.GradScaler.__init__

    @functools.wraps(original)
    def initialise(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, meant(device), *args, **kwargs)

    return initialise
