"""Redirect ``device="cuda"`` in functions that create tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _device as device_contexts

from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.device_names import Target, target_on

_FACTORIES = (
    "empty zeros ones full tensor as_tensor arange linspace logspace eye rand randn randint randperm normal "
    "empty_strided empty_permuted tril_indices triu_indices asarray scalar_tensor range from_file "
    "bartlett_window blackman_window hamming_window hann_window kaiser_window "
    "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor "
    "sparse_compressed_tensor "
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
).split()
_FACTORIES_BY_MODULE = {
    torch: _FACTORIES,
    torch.fft: ("fftfreq", "rfftfreq"),
    torch.nested: ("nested_tensor", "as_nested_tensor"),
}
_NEW = ("new_tensor", "new_empty", "new_empty_strided", "new_full", "new_zeros", "new_ones")


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements for torch's factories, ``Tensor.new_*`` and ``with torch.device(...)``."""
    target, can_pin = target_on(device), not device.is_host
    device_contexts._device_constructors()  # is called once, and must not find our replacements then
    yield device_contexts.DeviceContext, "__init__", _context_initializer(target)
    for module, names in _FACTORIES_BY_MODULE.items():
        for name in names:
            original = getattr(module, name)
            replacement = _with_device_keyword(original, target, can_pin)
            _keep_scriptable(original, replacement)
            yield module, name, replacement
    for name in _NEW:
        yield torch.Tensor, name, _with_device_keyword(getattr(torch.Tensor, name), target, can_pin)


def _context_initializer(target: Target) -> Callable[..., None]:
    original = device_contexts.DeviceContext.__init__

    @functools.wraps(original)
    def initialize(self: Any, device: Any) -> None:
        original(self, target(device))

    return initialize


def _with_device_keyword(original: Callable[..., Any], target: Target, can_pin: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = target(kwargs["device"])
        if not can_pin and kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # page-locking needs a driver; it changes speed only
        return original(*args, **kwargs)

    return factory


def _keep_scriptable(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Make ``torch.jit.script`` treat the replacement of a factory as the original operator."""
    from torch.jit import _builtins

    name = _builtins._find_builtin(original)
    if name is not None:
        _builtins._register_builtin(replacement, name)
