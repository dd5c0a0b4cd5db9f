"""Collectives that write to a tensor and do not count it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

# Of torch 2.13's: the others count what they write, or hand over to these. ``irecv`` does not count either;
# it stays as it is, as who batches point-to-point operations compares it with torch's own.
UNCOUNTED = ("broadcast", "recv", "scatter", "all_to_all", "all_to_all_single")


def counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective, whose writes to its first argument count as in-place operations do.

    What the attention has read from a mask is kept until the mask is written to. A data loader that receives
    every batch in the same buffer would train on the documents of the first one. Floating-point tensors are
    left alone: nothing is read from one and kept, and autograd would refuse the one that was sent.
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
