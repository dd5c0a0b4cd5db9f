"""Compare an adaptor with the upstream function that it replaces, in this process and on its device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

import torch


def load_stock(name: str) -> ModuleType:
    """Return a second copy of the module ``name`` that has not been patched."""
    spec = importlib.util.find_spec(name)
    parent, _, last = name.rpartition(".")
    copy = importlib.util.spec_from_file_location(f"{parent}._stock_{last}", spec.origin)
    module = importlib.util.module_from_spec(copy)
    sys.modules[copy.name] = module  # decorators of 0.19 ask there for the module of a function
    try:
        copy.loader.exec_module(module)
    finally:
        del sys.modules[copy.name]
    return module


def here() -> torch.device:
    """Return the device of this run, which is the NPU under ``megatron-npu sim``."""
    from megatron_npu import devices

    return devices.current().torch_device()


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers that require gradients, on the device of this run."""
    return torch.randn(shape, dtype=dtype, device=here(), requires_grad=True)


def same_gradients(
    ours: torch.Tensor,
    stock: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> None:
    """Compare two results and their gradients with respect to ``leaves``."""
    torch.testing.assert_close(ours, stock, atol=atol, rtol=rtol)
    grad = torch.randn_like(stock)
    a = torch.autograd.grad(ours, leaves, grad.clone())
    b = torch.autograd.grad(stock, leaves, grad.clone())
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, atol=atol, rtol=rtol)
