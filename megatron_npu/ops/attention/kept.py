"""What was found out about a mask, kept with it: every layer of a step is handed the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Value = TypeVar("Value")


def kept_with(tensor: Tensor, name: str, find: Callable[[], Value], recipe: object = ()) -> Value:
    """Return ``find()``, called once for a tensor until that is written to.

    Args:
        tensor: what ``find`` reads; the value dies with it.
        name: of the value, one per purpose.
        recipe: what else the value depends on; another one replaces what was kept.
    """
    attribute = f"_megatron_npu_{name}"
    state = (tensor._version, recipe)
    known = getattr(tensor, attribute, None)
    if known is not None and known[0] == state:
        return known[1]
    value = find()
    if not (isinstance(value, Tensor) and value.data_ptr() == tensor.data_ptr()):
        setattr(tensor, attribute, (state, value))  # but a view refers back: the two would never die
    return value
