"""Check the values in ``--model_args`` and ``--gen_kwargs`` of lm-eval, which parses them without knowing
their kinds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base.errors import UsageError

_ARGS = "--model_args"


def count(name: str, value: object, where: str = _ARGS, least: int = 1) -> int:
    """Return a whole number.

    Args:
        name: its key.
        value: what was given for it.
        where: the option that has the key.
        least: the smallest allowed number.

    Raises:
        UsageError: the value is not a whole number, or too small.
    """
    text = f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value).strip()
    if text.isdecimal() and text.isascii() and len(text) < 19 and int(text) >= least:
        return int(text)
    raise UsageError(
        f"{name} in {where} must be a whole number of at least {least}, but it is {value!r}",
        remedy=f"Change or remove {name}.",
    )


def real(name: str, value: object, where: str, least: float = 0.0) -> float:
    """Return a finite number; see ``count``."""
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if math.isfinite(found) and found >= least:
        return found
    raise UsageError(
        f"{name} in {where} must be a finite number of at least {least:g}, but it is {value!r}",
        remedy=f"Change or remove {name}.",
    )


def switch(name: str, value: object) -> bool:
    """Return True or False; see ``count``."""
    if value in (True, False):
        return bool(value)
    raise UsageError(
        f"{name} in {_ARGS} must be true or false, but it is {value!r}", remedy=f"Change or remove {name}."
    )


def require_known(load: object, unknown: Mapping[str, Any], device: str | None) -> None:
    """Check the keys of ``--model_args``, and what is given beside them.

    Raises:
        UsageError: a key is missing or unknown, or the device is not that of this process.
    """
    if not load:
        raise UsageError(
            f"{_ARGS} has no checkpoint", remedy=f"Add {_ARGS} load=DIR, with the folder of --save."
        )
    if unknown:
        raise UsageError(
            f"unknown key {next(iter(unknown))} in {_ARGS}; the supported keys are load, vocab_file, "
            "merge_file, fp16, bf16, tensor_model_parallel_size, pipeline_model_parallel_size, max_length "
            "and max_gen_toks",
            remedy="Remove it.",
        )
    here = devices.current().torch_device()
    # lm-eval's default is cuda:0, which means this machine's device here
    if device is not None and _kind(device) not in ("cuda", here.type):
        raise UsageError(
            f"--device must be {here.type}, the device of this process, but got {device}",
            remedy="Select the device with MEGATRON_NPU_DEVICE.",
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_initialized():
        raise UsageError(
            "a process group already exists, but the evaluation must create its own",
            remedy="Start the processes with torchrun.",
        )


def require_once(given: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    """Check that no key of ``--model_args`` is also an option of its own.

    Raises:
        UsageError: a key is both.
    """
    for name in given.keys() & {name for name, value in beside.items() if value is not None}:
        raise UsageError(f"{name} is not a key of {_ARGS}", remedy=f"Use --{name} {given[name]}.")


def _kind(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError:
        return ""
