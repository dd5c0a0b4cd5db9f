"""Convert Megatron's own option errors to a one-line message instead of a traceback.

Patches ``transformer.transformer_config`` of ``megatron.core``; ``arguments`` does the same for scripts.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.base.errors import UsageError


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Convert upstream's option errors to one-line errors that can also be caught as upstream's exception
    type.

    An assertion without a message is left unchanged, because only its source line explains it.
    """
    try:
        yield
    except (AssertionError, ValueError) as error:
        if isinstance(error, UsageError) or not str(error):
            raise
        kind = _kind(AssertionError if isinstance(error, AssertionError) else ValueError)
        said = str(error).strip().rstrip(".")
        raise kind(f"Megatron rejects these options: {said}", remedy=_remedy(said)) from error


def _remedy(said: str) -> str:
    """Return the advice that belongs to an error message of upstream."""
    layout = re.match(r"world size \(\d+\) is not divisible by total_model_size \((.*)\)", said)
    if layout is None:
        return "Change the options that the message names."
    size = sum(map(int, re.findall(r"=(\d+)", layout[1])))  # 0.12 names two sizes, of encoder and decoder
    return (
        f"Start a multiple of {size} processes, such as `torchrun --nproc-per-node {size} -m megatron_npu "
        "run SCRIPT …`, or change the parallel sizes."
    )


@functools.cache
def _kind(kind: type[Exception]) -> type[UsageError]:
    """Return a UsageError class that callers can also catch as an AssertionError or a ValueError."""
    return type("RefusedOptionsError", (UsageError, kind), {"blames_caller": True})


@around(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    why="options that upstream rejects end a script with a traceback of about twenty lines and exit code 1",
    order=0,  # innermost of several: only what upstream itself refuses ends here
)
def configure(original: Callable[[Any], None], self: Any) -> None:
    """Convert the errors of upstream's configuration checks to one-line messages."""
    with in_one_line():
        original(self)
