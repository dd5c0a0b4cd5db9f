"""Gather all parameters, where they are otherwise gathered during the forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def gathered(model: list[Any], *, overlaps: bool) -> Iterator[None]:
    """Have all parameters gathered inside the block.

    Args:
        model: its chunks.
        overlaps: whether they are gathered while they run (--overlap-param-gather); else nothing is to do.
    """
    if not overlaps:
        yield
        return
    for chunk in model:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in model:
        chunk.enable_forward_pre_hook()
