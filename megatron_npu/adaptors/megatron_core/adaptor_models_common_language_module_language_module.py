"""``megatron.core.models.common.language_module.language_module``: switches of TransformerEngine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap

logger = logging.getLogger(__name__)

_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@wrap(
    "megatron.core.models.common.language_module.language_module:LanguageModule._set_attention_backend",
    condition=transformer_engine_present,
    why="it demands that NVTE_FLASH_ATTN and the like, which launch scripts export for TransformerEngine, "
    "are those of --attention-backend, and exports them: a second model with another backend is refused, too",
)
def leave_switches_alone(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Neither read nor export them: nobody asks without TransformerEngine. Say so where they are set."""

    @functools.wraps(original)
    def _set_attention_backend(self: Any) -> None:
        given = tuple(f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ)
        if given:
            _say(" ".join(given))

    return _set_attention_backend


@functools.cache
def _say(given: str) -> None:
    logger.warning("%s: without TransformerEngine only --attention-backend chooses the attention", given)
