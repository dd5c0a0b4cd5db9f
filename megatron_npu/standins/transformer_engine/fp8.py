"""Stub for ``transformer_engine.pytorch.fp8``, the global fp8 state, which is always off."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from megatron_npu.standins.transformer_engine.recipe import refuse


class FP8GlobalStateManager:
    """The queries of the fp8 state that upstream uses."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False."""
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        """Return None, because no recipe is in use."""


def fp8_autocast(enabled: bool = True, **_: Any) -> AbstractContextManager[None]:
    """Return a context that has no effect.

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
    return False, "the layers that megatron_npu provides under TransformerEngine's names do not support fp8"
