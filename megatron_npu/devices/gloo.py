"""What gloo cannot do and Megatron asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def regardless_of_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``all_gather_into_tensor`` or ``reduce_scatter_tensor`` that counts numbers only, as NCCL does.

    gloo wants the larger tensor to be the smaller one stacked or concatenated. Megatron gathers
    ``[s, b, h]`` shards into one flat buffer (``gather_split_1d_tensor``). Both are contiguous memory.
    """

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and args[0].dim() != args[1].dim() and all(t.is_contiguous() for t in args[:2]):
            args = (args[0].view(-1), args[1].view(-1), *args[2:])
        return original(*args, **kwargs)

    return collective
