"""``megatron.arguments``: the flags that the plug-in adds, and what torch's launchers pass today."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

from megatron_npu import attention_flags
from megatron_npu.adaptors.megatron_lm.decorators import WITHOUT_CUDA, wrap


@wrap(
    "megatron.arguments:_add_training_args",
    why="--pre-tockens, --next-tockens and --shape-order of the fused attention",
)
def add_attention_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags to the parser."""

    @functools.wraps(original)
    def _add_training_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        attention_flags.add_attention_flags(parser)
        return parser

    return _add_training_args


@wrap(
    "megatron.arguments:_add_distributed_args",
    why="torch.distributed.launch passes --local-rank since torch 2.0; upstream knows --local_rank",
)
def accept_local_rank_with_a_dash(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accept both spellings."""

    @functools.wraps(original)
    def _add_distributed_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        parser.add_argument("--local-rank", dest="local_rank", type=int, help=argparse.SUPPRESS)
        return parser

    return _add_distributed_args


@wrap("megatron.arguments:parse_args", why="the flags of the fused attention take effect once parsed")
def publish_attention_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy the flags to ``attention_flags.CURRENT``."""

    @functools.wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        parsed = original(*args, **kwargs)
        attention_flags.CURRENT = attention_flags.AttentionFlags.from_args(parsed)
        return parsed

    return parse_args


@wrap(
    "megatron.arguments:validate_args",
    devices=WITHOUT_CUDA,
    why="it demands CUDA_DEVICE_MAX_CONNECTIONS=1, which nothing but CUDA's driver reads",
)
def presume_one_connection(original: Callable[..., Any]) -> Callable[..., Any]:
    """Set the variable where the user has not."""

    @functools.wraps(original)
    def validate_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return original(*args, **kwargs)

    return validate_args


@wrap(
    "megatron.arguments:validate_args",
    why="T5 with --num-layers alone, as in upstream's examples, has no number of decoder layers and fails",
)
def complete_decoder_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give the decoder as many layers as the encoder where the user has not said."""

    @functools.wraps(original)
    def validate_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        validated = original(*args, **kwargs)
        if validated.decoder_num_layers is None:
            validated.decoder_num_layers = validated.encoder_num_layers
        return validated

    return validate_args
