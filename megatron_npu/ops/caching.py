"""What is computed once and used again: kept with the tensor it was found out about, or per arguments.

Generation runs under ``torch.inference_mode()``, training in the same process does not. A tensor made in that
mode can never be saved for a backward, and it does not count what is written to it: nothing is kept with
such a tensor, and what is kept is never made in that mode.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def kept_with(tensor: Tensor, name: str, find: Callable[[], Value], recipe: object = ()) -> Value:
    """Return ``find()``, called once for a tensor until that is written to: every layer is handed the same.

    Args:
        tensor: what ``find`` reads; the value dies with it.
        name: of the value, one per purpose.
        recipe: what else the value depends on; another one replaces what was kept.
    """
    if tensor.is_inference():
        return find()
    attribute = _attribute(name)
    state = (id(tensor), tensor._version, recipe)  # a deep copy takes along what was kept
    known = getattr(tensor, attribute, None)
    if known is not None and known[0] == state:
        return known[1]
    with usable_in_training():
        value = find()
    if not (isinstance(value, Tensor) and value.data_ptr() == tensor.data_ptr()):
        setattr(tensor, attribute, (state, value))  # but a view refers back: the two would never die
    return value


def kept_on(
    owner: object, name: str, sources: Sequence[Tensor | None], find: Callable[[], Value], recipe: object = ()
) -> Value:
    """As ``kept_with`` for what is found in several tensors: kept on the object that holds them.

    Args:
        owner: takes attributes; a copy of it takes along what was kept, which its own tensors do not match.
        sources: what ``find`` reads: another tensor, or one that was written to, replaces what was kept.
    """
    if any(source is not None and source.is_inference() for source in sources):
        return find()
    state = (tuple(None if source is None else source._version for source in sources), recipe)
    known = getattr(owner, _attribute(name), None)
    if known is not None and known[0] == state and all(map(operator.is_, known[1], sources)):
        return known[2]
    with usable_in_training():
        value = find()
    setattr(owner, _attribute(name), (state, tuple(sources), value))
    return value


def _attribute(name: str) -> str:
    return f"_megatron_npu_{name}"


def kept_per_arguments(maxsize: int) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function whose results are used again as ``functools.lru_cache`` does."""

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.lru_cache(maxsize)
        @functools.wraps(function)
        def make(*args: Any) -> Any:
            with usable_in_training():
                return function(*args)

        return make

    return decorate


@contextlib.contextmanager
def usable_in_training() -> Iterator[None]:
    """Make tensors that are like any other, also where the caller is in inference mode; no graph."""
    with torch.inference_mode(False), torch.no_grad():  # the first switches gradients on
        yield
