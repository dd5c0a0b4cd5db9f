"""Stub for ``deepspeed.compression.compress``, which DeepSpeed 0.19.8 no longer has."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_npu.base.errors import UsageError


def init_compression(*args: Any, **kwargs: Any) -> NoReturn:
    """Reject a request for model compression.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        'DeepSpeed\'s configuration contains "compression_training", which DeepSpeed no longer supports. '
        "Remove that section."
    )


redundancy_clean = init_compression
