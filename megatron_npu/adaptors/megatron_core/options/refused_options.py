"""Turn Megatron's own option errors into a one-line message instead of a traceback.

Patches ``transformer.transformer_config`` of ``megatron.core``; ``arguments`` does the same for scripts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.base.errors import UsageError


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Raise upstream's option errors as a UsageError that is also of upstream's type.

    An assertion without a message is left unchanged: only its source line explains it.
    """
    try:
        yield
    except (AssertionError, ValueError) as error:
        if isinstance(error, UsageError) or not str(error):
            raise
        kind = _kind(AssertionError if isinstance(error, AssertionError) else ValueError)
        said = str(error).strip().rstrip(".")
        raise kind(
            f"Megatron rejects these options: {said}",
            "a combination of options that Megatron supports",
            "Change the options that the message names.",
        ) from error


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
    """Turn the errors of upstream's checks into one-line messages."""
    with in_one_line():
        original(self)
