"""Patch ``megatron.arguments`` to add arguments that the pretraining scripts read but upstream does not
set.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import UNTIL, around


@around(
    "megatron.arguments:parse_args",
    why="pretrain_gpt.py reads deepspeed_config_dict, which exists only with --deepspeed; without the flag "
    "it raises an AttributeError",
    upstream_bug=True,
    until=UNTIL,
)
def without_configuration(original: Callable[..., Any], *args: Any, **kwargs: Any) -> argparse.Namespace:
    """Set the argument ``deepspeed_config_dict`` to None, which is its value without ``--deepspeed``."""
    parsed: argparse.Namespace = original(*args, **kwargs)
    parsed.deepspeed_config_dict = None
    return parsed


@around(
    "megatron.arguments:validate_args",
    why="a T5 without --decoder-num-layers raises a TypeError",
    upstream_bug=True,
    until=UNTIL,
)
def with_layers_of_the_decoder(original: Callable[..., Any], *args: Any, **kwargs: Any) -> argparse.Namespace:
    """Set the number of decoder layers to the number of encoder layers if it is not given."""
    validated: argparse.Namespace = original(*args, **kwargs)
    if validated.decoder_num_layers is None:
        validated.decoder_num_layers = validated.encoder_num_layers
    return validated
