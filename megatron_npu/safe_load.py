"""What ``torch.load(weights_only=True)`` may build of a file, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import serialization


@contextlib.contextmanager
def allowing(*entries: Any, alone: bool = False) -> Iterator[None]:
    """Let torch build these, and afterwards what it was allowed before.

    ``torch.serialization.safe_globals`` (2.13) forbids afterwards what it was given, even what was allowed
    before; megatron-core allows its classes for the whole process when it is imported.

    Args:
        entries: classes and functions, or pairs of one with the name that it has in the file.
        alone: and nothing else.
    """
    before = serialization.get_safe_globals()
    if alone:
        serialization.clear_safe_globals()
    serialization.add_safe_globals(list(entries))
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)
