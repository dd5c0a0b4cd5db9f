"""Accept or reject flags of older Megatron versions, which occur in tutorials.

Megatron-LM from 2020 to 2023 (including 285068c8) had these flags. megatron-core's scripts still declare some
of them, and most of these end with an assertion or exit code 0. ``add`` adds the flags that a parser does not
have, and ``apply`` applies their meaning. The built-in trainer and the adaptors for megatron-core's scripts
use both.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_npu.base.arg_parser import integer, number, positive
from megatron_npu.base.errors import UsageError, either


@dataclass(frozen=True)
class OlderFlag:
    """A flag that existed in an older Megatron version.

    Attributes:
        flag: the flag as typed.
        today: its current meaning, for the log line and the help.
        options: the options of ``add_argument``, besides ``help``.
        fills: the argument fields that it sets unless a current flag does.
        sets: the argument fields that get its value, if they exist.
        only: the values that are still accepted; if empty, all values that ``options`` accept.
        remedy: advice for a rejected value, or for a rejected flag.
        refused: whether the flag is rejected because it has no current equivalent.
        said: whether it is logged only if typed, because its default equals an explicit value.
    """

    flag: str
    today: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fills: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    remedy: str = ""
    refused: bool = False
    said: bool = False

    @property
    def dest(self) -> str:
        """The name of the flag's attribute in the parsed arguments."""
        return self.options.get("dest", self.flag.removeprefix("--").replace("-", "_"))


_SWITCH = {"action": "store_true"}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

OLDER = (
    OlderFlag(
        "--checkpoint-activations",
        "is now --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        _SWITCH,
        fills=_FULL,
    ),
    OlderFlag(
        "--checkpoint-num-layers",
        "is now --recompute-num-layers",
        {"type": positive},
        sets=("recompute_num_layers",),
    ),
    OlderFlag(
        "--data-impl",
        "has no effect now: every dataset is read through a memory map",
        {"metavar": "IMPL"},
        only=("mmap", "lazy", "cached", "infer"),
        remedy="Remove the flag: the format of a dataset is detected.",
    ),
    OlderFlag(
        "--mmap-warmup",
        "has no effect now: the operating system prefetches files",
        _SWITCH,
    ),
    OlderFlag(
        "--distributed-backend",
        "has no effect now: the device determines the backend (HCCL on npu, NCCL on cuda, gloo on cpu)",
        {"default": "nccl", "metavar": "BACKEND"},
        only=("nccl", "gloo"),
        remedy="Remove the flag: the device determines the backend.",
        said=True,
    ),
    OlderFlag(
        "--DDP-impl",
        "has no effect now: Megatron's own data parallelism is always used",
        {"metavar": "IMPL"},
        only=("local",),
        remedy="Remove the flag: gradients are averaged as with torch's DDP.",
    ),
    OlderFlag(
        "--no-contiguous-buffers-in-local-ddp",
        "has no effect now: gradients are always in contiguous buffers",
        _SWITCH,
    ),
    OlderFlag(
        "--layernorm-epsilon",
        "is now --norm-epsilon",
        {"type": number, "dest": "older_layernorm_epsilon"},
        sets=("norm_epsilon", "layernorm_epsilon"),
    ),
    OlderFlag(
        "--no-query-key-layer-scaling",
        "has no effect now: this is off unless --apply-query-key-layer-scaling is given",
        _SWITCH,
    ),
    OlderFlag("--log-batch-size-to-tensorboard", "has no effect now: the choice no longer exists", _SWITCH),
    OlderFlag(
        "--batch-size",
        "",
        {"type": integer},
        refused=True,
        remedy="Use --micro-batch-size (sequences per rank) and --global-batch-size (sequences per "
        "iteration).",
    ),
    OlderFlag(
        "--warmup",
        "",
        {"type": number},
        refused=True,
        remedy="Use --lr-warmup-fraction (formerly a percentage) or --lr-warmup-iters.",
    ),
    OlderFlag(
        "--model-parallel-size",
        "",
        {"type": integer},
        refused=True,
        remedy="Use --tensor-model-parallel-size.",
    ),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add those flags of older Megatron versions that ``parser`` does not have."""
    group = parser.add_argument_group(
        title="older flags", description="flags from versions of Megatron-LM that predate megatron-core"
    )
    for older in OLDER:
        if older.flag not in parser._option_string_actions:
            told = f"refused: {older.remedy}" if older.refused else older.today
            group.add_argument(older.flag, **older.options, help=told)


def apply(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Apply the current meaning of the given older flags, and log one line for each of them on rank 0.

    Args:
        args: the parsed arguments, which are changed in place.
        words: the command line.

    Raises:
        UsageError: a flag or its value is rejected, or contradicts a current flag.
    """
    for older in OLDER:
        value = getattr(args, older.dest, None)
        typed = any(word.partition("=")[0] == older.flag for word in words)
        if value is None or value is False or (older.said and not typed):  # 0 is given, and equals False
            continue
        given = older.flag if value is True else f"{older.flag} {value}"
        _check(older, value, given)
        _fill(older, args)
        for name in filter(partial(hasattr, args), older.sets):
            setattr(args, name, value)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"megatron_npu: {given}, a flag from older versions of Megatron, {older.today}", flush=True)


def _check(older: OlderFlag, value: Any, given: str) -> None:
    if older.refused:
        raise UsageError(
            f"{given}, a flag from older versions of Megatron, is no longer supported", remedy=older.remedy
        )
    if older.only and value not in older.only:
        raise UsageError(f"{older.flag} must be {either(older.only)}, but got {value}", remedy=older.remedy)


def _fill(older: OlderFlag, args: argparse.Namespace) -> None:
    """Set the arguments that an older flag implies.

    Values set by current flags are kept.
    """
    granularity = getattr(args, "recompute_granularity", None) if older.fills else None
    if granularity not in (None, older.fills.get("recompute_granularity")):
        raise UsageError(
            f"{older.flag} conflicts with --recompute-granularity {granularity}",
            remedy=f"Remove {older.flag}.",
        )
    for name, value in older.fills.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
