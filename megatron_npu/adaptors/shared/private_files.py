"""What a stock script writes is its user's and his group's: files 640, folders 750."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.base import files

WHY = (
    "checkpoints, curves and indices of a script that nobody started with `megatron-npu run` are open to all"
)


def tighten_umask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let new files be private (``files.tighten_umask``).

    At the start of a training, evaluation or inference, and not where Megatron is imported: a program that
    uses it as a library keeps its umask. Processes that the script starts inherit it.
    """
    files.tighten_umask()
    return original(*args, **kwargs)
