"""Stub for megatron-core's functions that move inference states of Mamba layers, used without triton.

The layer itself requires mamba_ssm, which is written in triton too, so no model that can be built calls these
functions.
"""

from __future__ import annotations

from typing import Any, NoReturn


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Reject every call, because triton is not installed.

    Raises:
        RuntimeError: always, because the kernels are written in triton.
    """
    raise RuntimeError("Mamba layers require the packages triton and mamba_ssm, which are not installed")


tensor_get_slice_after = tensor_merge = tensor_masked_update = _refuse
