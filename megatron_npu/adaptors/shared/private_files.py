"""Make the output of stock scripts private to the user and group: files 640, folders 750."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_npu.base import files
from megatron_npu.patching.registry import Recorder

WHY_DATASET = "a dataset written by `python tools/preprocess_data.py` is readable by everyone"
WHY = (
    "checkpoints, curves and indices of a script that was not started with `megatron-npu run` are "
    "readable by everyone"
)


def tighten_umask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make new files private to the user and group (see ``files.tighten_umask``).

    This happens at the start of training, evaluation or inference, not when Megatron is imported, so that a
    program that uses Megatron as a library keeps its umask. Processes that the script starts inherit the
    umask.
    """
    files.tighten_umask()
    return original(*args, **kwargs)


def privately(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make the files that ``original`` creates private to the user and group."""
    mask = files.tighten_umask()
    try:
        return original(*args, **kwargs)
    finally:
        os.umask(mask)


def keep_datasets(recorder: Recorder, module: str, *builders: str) -> None:
    """Record patches that make the .bin and .idx files written by a checkout's tools private.

    Args:
        recorder: the checkout's recorder.
        module: the module that contains the dataset builders.
        builders: the names of the builders; a builder opens the .bin file when it is created, and the .idx
            file at the end.
    """
    for builder in builders:
        for method in ("__init__", "finalize"):
            recorder.around(f"{module}:{builder}.{method}", why=WHY_DATASET)(privately)
