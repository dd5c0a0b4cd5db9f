"""Provide Triton kernels for NVIDIA GPUs that pass over memory once where torch's kernels pass over it
several times.

``kernels`` defines the kernels, and the other modules launch them. Results differ from torch's only by
rounding, which happens less often here. The kernels require triton (installed with torch's CUDA wheels) and
compute capability 8.0 or later. triton is imported only when a kernel is launched.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron_npu.base import settings
from megatron_npu.base.installed_packages import is_installed

__all__ = ["not_to_be_expected", "refusal", "switched_off"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OLDEST = (8, 0)


@functools.cache
def switched_off() -> bool:
    """Return True if ``MEGATRON_NPU_TRITON=0`` disables our Triton kernels."""
    return not settings.TRITON.enabled()


def not_to_be_expected() -> str | None:
    """Return the reason why Triton kernels cannot run in this process, or None.

    The GPU's age is not checked.
    """
    if switched_off():
        return f"{settings.TRITON.name}=0"
    return None if is_installed("triton") else "triton is not installed"


@functools.cache
def absence() -> str | None:
    """Return the reason why Triton kernels cannot run on this process's GPU, or None if they can."""
    if not is_installed("triton"):
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < _OLDEST:
        return f"the GPU has compute capability {major}.{minor}, older than {_OLDEST[0]}.{_OLDEST[1]}"
    return _trouble()


def _trouble() -> str | None:
    """Return the reason why Triton is unable to launch kernels, or None if it can.

    For example, Triton requires a C compiler.
    """
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # whatever its build, the compiler or the driver raises
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"triton does not work on this machine: {told}"
    return None


def refusal(*tensors: Tensor | None) -> str | None:
    """Return the reason why our kernels do not support the given GPU tensors, or None if they do.

    The GPU is not synchronized.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in _DTYPES:
            return f"our kernels do not support {tensor.dtype}"
        if hasattr(tensor, "to_local"):
            return f"our kernels do not support a {type(tensor).__name__}"
        if tensor.device.type != "cuda":
            return f"our kernels support GPU tensors, not tensors on {tensor.device.type}"
    return absence()
