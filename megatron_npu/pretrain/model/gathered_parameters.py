"""Gather all parameters at once, before the forward pass needs them one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def gathered(model: list[Any], *, overlaps: bool) -> Iterator[None]:
    """Gather all parameters for the duration of the ``with`` block.

    Args:
        model: the model's chunks.
        overlaps: whether parameters are gathered during the forward pass (--overlap-param-gather); if not,
            nothing is done.
    """
    if not overlaps:
        yield
        return
    for chunk in model:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in model:
        chunk.enable_forward_pre_hook()
