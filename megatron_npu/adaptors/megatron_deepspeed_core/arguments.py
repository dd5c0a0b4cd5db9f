"""``megatron.arguments``: what ``pretrain_gpt.py`` reads with ``--deepspeed`` and without."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_deepspeed_core.decorators import around


@around(
    "megatron.arguments:parse_args",
    why="pretrain_gpt.py reads deepspeed_config_dict, which there is with --deepspeed alone: without it ends "
    "in an AttributeError",
    upstream_bug=True,
    until="4efb479d is its last commit: for ever",
)
def without_configuration(original: Callable[..., Any], *args: Any, **kwargs: Any) -> argparse.Namespace:
    """Let there be none without."""
    parsed: argparse.Namespace = original(*args, **kwargs)
    parsed.deepspeed_config_dict = None
    return parsed
