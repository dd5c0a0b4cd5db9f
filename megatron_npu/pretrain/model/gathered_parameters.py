"""All parameters at hand, where they are otherwise gathered while the forward pass computes."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def gathered(args: Namespace, model: list[Any]) -> Iterator[None]:
    """Have all parameters gathered inside the block (--overlap-param-gather gathers them while running)."""
    if not args.overlap_param_gather:
        yield
        return
    for chunk in model:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in model:
        chunk.enable_forward_pre_hook()
