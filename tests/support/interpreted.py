"""Run Triton's kernels without a GPU, with its interpreter and tensors on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_npu.base.installed_packages import is_installed


def device() -> str | None:
    """Prepare Triton's kernels and return the device that they run on, or None without Triton.

    If there is no GPU, the kernels are interpreted, which tests/conftest.py has requested.
    """
    if not is_installed("triton"):
        return None
    if torch.cuda.is_available():
        return "cuda"
    _let_scalars_be_numbers()
    return "cpu"


@functools.cache
def _let_scalars_be_numbers() -> None:
    """Let a tensor of one value bound a loop: Triton 3.6's interpreter asks of numpy what 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
