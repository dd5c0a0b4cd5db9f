"""Turn Megatron's own option errors into one line instead of a traceback.

Connects ``transformer.transformer_config`` of ``megatron.core``; ``arguments`` does the same for scripts.
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
    """Raise what upstream says of options as a UsageError, which is of upstream's kind too.

    An assertion without words is left as it is: what tells something then is the line that it is in.
    """
    try:
        yield
    except (AssertionError, ValueError) as error:
        if isinstance(error, UsageError) or not str(error):
            raise
        kind = _kind(AssertionError if isinstance(error, AssertionError) else ValueError)
        said = str(error).strip().rstrip(".")
        raise kind(
            f"options that Megatron rejects: {said}",
            "options that can be combined",
            "Change the options that the message names.",
        ) from error


@functools.cache
def _kind(kind: type[Exception]) -> type[UsageError]:
    """Return a UsageError that programs catch which expect an AssertionError or a ValueError."""
    return type("RefusedOptionsError", (UsageError, kind), {"blames_caller": True})


@around(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    why="options that upstream refuses end a script in a traceback of some twenty lines, with exit code 1",
    order=0,  # innermost of several: only what upstream itself refuses ends here
)
def configure(original: Callable[[Any], None], self: Any) -> None:
    """Turn errors of upstream's checks into one line."""
    with in_one_line():
        original(self)
