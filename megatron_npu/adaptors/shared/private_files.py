"""What a stock script writes is its user's and his group's: files 640, folders 750."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

PRIVATE = 0o027  # what is taken from the modes of new files and folders: the group's write, all of others'
WHY = (
    "checkpoints, curves and indices of a script that nobody started with `megatron-npu run` are open to all"
)


def tighten_umask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take no less than ``PRIVATE`` from the modes of new files; a tighter umask of the user stays.

    At the start of a training, evaluation or inference, and not where Megatron is imported: a program that
    uses it as a library keeps its umask. Processes that the script starts inherit it.
    """
    os.umask(os.umask(0o077) | PRIVATE)
    return original(*args, **kwargs)
