"""``megatron.core.transformer.attention``: the attention of the dynamic inference engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from megatron_npu.adaptors.megatron_core.decorators import installed, wrap
from megatron_npu.errors import UsageError

_MODULE = "megatron.core.transformer.attention"


def refused(original: Callable[..., Any]) -> Callable[..., NoReturn]:
    """Say what the engine needs, and what works without.

    The static engine of 0.16 tries the dynamic one first, and takes its own way when that fails.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the dynamic inference engine without the package flash-attn, which is for CUDA",
            "an engine that works without it",
            "Use a static one: gpt_static_inference.py, or run_text_generation_server.py.",
        )

    return refuse


wrap(
    f"{_MODULE}:is_fa_min_version",
    versions=">=0.13",
    condition=partial(installed, "flash_attn", "flash_attn_3", "flashattn_hopper"),
    why="nothing but flash-attn reads the dynamic engine's cache; where it is absent the question for its "
    "version is a ModuleNotFoundError in the middle of the model",
)(refused)
wrap(
    f"{_MODULE}:Attention.flash_decode_and_prefill",
    versions="<0.13",
    condition=partial(installed, "nvidia_chunked_flash_attn"),
    why="nothing but flash-attn reads the dynamic engine's cache; where it is absent 0.12 calls None",
)(refused)
