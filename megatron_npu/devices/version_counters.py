"""Increment the version counters of tensors to which collectives write, as in-place operations do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

# As of torch 2.13; the other collectives raise it, or call one of these. ``irecv`` does not raise it either,
# but is left alone: ``batch_isend_irecv`` compares the functions that it is given with torch's own.
WITHOUT_BUMP = ("broadcast", "recv", "scatter", "all_to_all", "all_to_all_single")


def bump_version(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that increments the version counters of the tensors in its first argument.

    Attention caches values read from a mask until the mask is written to. With a data loader that receives
    every batch in the same buffer, it would otherwise use the document boundaries of the first batch.
    Floating-point tensors are not changed: nothing is cached from them, and autograd would raise an error for
    a sent tensor.
    """
    first = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = args[0] if args else kwargs[first]
        written = [given] if isinstance(given, Tensor) else given
        increment_version([tensor for tensor in written if not tensor.is_floating_point()])
        return result

    return collective
