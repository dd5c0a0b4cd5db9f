"""Select the attention implementation from the settings of TransformerEngine and of the dynamic engine.

Patches ``models.common.language_module.language_module`` and ``transformer.attention``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_npu.adaptors.megatron_core.decorators import around, installed, transformer_engine_present
from megatron_npu.base.errors import UsageError

logger = logging.getLogger(__name__)

_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@around(
    "megatron.core.models.common.language_module.language_module:LanguageModule._set_attention_backend",
    condition=transformer_engine_present,
    why=(
        "upstream requires that NVTE_FLASH_ATTN and related variables, which launch scripts export for "
        "TransformerEngine, match --attention-backend, and exports them: a second model with another "
        "backend is rejected too"
    ),
)
def leave_switches_alone(original: Callable[[Any], None], self: Any) -> None:
    """Log which attention environment variables are set, without checking or exporting them.

    Only TransformerEngine reads them.
    """
    given = tuple(f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ)
    if given:
        _say(" ".join(given))


@functools.cache
def _say(given: str) -> None:
    logger.warning(
        "%s has no effect, because without TransformerEngine only --attention-backend selects the attention",
        given,
    )


@around(
    "megatron.core.transformer.attention:is_fa_min_version",
    versions=">=0.13",
    condition=functools.partial(installed, "flash_attn", "flash_attn_3", "flashattn_hopper"),
    why="only flash-attn can read the dynamic engine's cache; if it is not installed, querying its version "
    "raises a ModuleNotFoundError inside the model",
)
@around(
    "megatron.core.transformer.attention:Attention.flash_decode_and_prefill",
    versions="<0.13",
    condition=functools.partial(installed, "nvidia_chunked_flash_attn"),
    why="only flash-attn can read the dynamic engine's cache; if it is not installed, 0.12 calls None",
)
def refuse_dynamic_engine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error that lists the unmet requirements of the dynamic engine, and the alternatives to it.

    In 0.16, the static engine tries the dynamic engine first and falls back to its own code if that fails.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "the dynamic inference engine requires flash-attn, which is not installed and requires CUDA. Use a "
        "static engine: gpt_static_inference.py, or run_text_generation_server.py."
    )
