"""``transformer_engine.pytorch.fp8``: the global fp8 state, which is always off."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from megatron_npu.standins.transformer_engine.recipe import refuse


class FP8GlobalStateManager:
    """The queries that upstream makes about the fp8 state."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False."""
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        """Return None: no recipe is in use."""


def fp8_autocast(enabled: bool = True, **_: Any) -> AbstractContextManager[None]:
    """Return a context that does nothing.

    Raises:
        UsageError: ``enabled`` is set.
    """
    return refuse("fp8_autocast") if enabled else contextlib.nullcontext()


def fp8_model_init(enabled: bool = True, **_: Any) -> AbstractContextManager[None]:
    """Return a context in which parameters are created in their own precision.

    Raises:
        UsageError: ``enabled`` is set.
    """
    return refuse("fp8_model_init") if enabled else contextlib.nullcontext()


def check_fp8_support() -> tuple[bool, str]:
    """Return False, and why fp8 is not supported."""
    return False, "layers of megatron_npu under TransformerEngine's names have no fp8"
