"""Stub for megatron-core's batch-invariant kernels, used without triton; the batch-invariant mode is
always off.
"""

from __future__ import annotations

from typing import Any


def enable_batch_invariant_mode(*_: Any, **__: Any) -> None:
    """Reject a request for batch-invariant mode.

    Raises:
        RuntimeError: always, because the kernels are written in triton.
    """
    raise RuntimeError("--batch-invariant-mode requires the package triton, which is not installed")


def is_batch_invariant_mode_enabled() -> bool:
    """Return False, because batch-invariant mode is not supported."""
    return False
