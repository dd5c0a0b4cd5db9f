"""Stub for ``transformer_engine.pytorch.fp8``, whose global fp8 state is always off."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from megatron_npu.standins.transformer_engine.recipe import refuse


class FP8GlobalStateManager:
    """Stub for the manager of the global fp8 state, with the queries that upstream makes."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False, because fp8 is not supported."""
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        """Return None, because no fp8 recipe is in use."""


def fp8_autocast(enabled: bool = True, **_: Any) -> AbstractContextManager[None]:
    """Return a context that has no effect, because fp8 is not supported.

    Raises:
        UsageError: ``enabled`` is True.
    """
    return refuse("fp8_autocast") if enabled else contextlib.nullcontext()


def fp8_model_init(enabled: bool = True, **_: Any) -> AbstractContextManager[None]:
    """Return a context in which parameters are created in their own precision.

    Raises:
        UsageError: ``enabled`` is True.
    """
    return refuse("fp8_model_init") if enabled else contextlib.nullcontext()


def check_fp8_support() -> tuple[bool, str]:
    """Return False, and the reason why fp8 is not supported."""
    return _unsupported("fp8")


def check_mxfp8_support() -> tuple[bool, str]:
    """Return False, and the reason why mxfp8, with one scale for 32 values, is not supported."""
    return _unsupported("mxfp8")


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Return False, and the reason why block-scaled fp8 is not supported."""
    return _unsupported("block-scaled fp8")


def check_nvfp4_support() -> tuple[bool, str]:
    """Return False, and the reason why nvfp4 is not supported."""
    return _unsupported("nvfp4")


def _unsupported(precision: str) -> tuple[bool, str]:
    return (
        False,
        f"the layers that megatron_npu provides under TransformerEngine's names do not support {precision}",
    )
