"""Cache computed values on the tensors or objects that they are computed from, or by function arguments.

Generation runs under ``torch.inference_mode()``, and training in the same process does not. A tensor created
in that mode can never be saved for backward, and its version does not count writes: nothing is cached on such
tensors, and cached values are never created in that mode.
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


def cache_on_tensor(tensor: Tensor, name: str, compute: Callable[[], Value], key: object = ()) -> Value:
    """Return the value of ``compute()``, cached on a tensor until that tensor is modified.

    All layers share the value.

    Args:
        tensor: the tensor that ``compute`` reads; the cached value lives as long as the tensor.
        name: the name of the value, one for each purpose.
        key: any other data that the value depends on; a different key replaces the cached value.
    """
    if tensor.is_inference():
        return compute()
    attribute = _attribute(name)
    state = (id(tensor), tensor._version, key)  # the id, as a deep copy takes the cached value along
    cached = getattr(tensor, attribute, None)
    if cached is not None and cached[0] == state:
        return cached[1]
    with usable_in_training():
        value = compute()
    if not (isinstance(value, Tensor) and value.data_ptr() == tensor.data_ptr()):
        setattr(tensor, attribute, (state, value))  # but a view refers back: neither would ever be freed
    return value


def cache_on_object(
    owner: object, name: str, sources: Sequence[Tensor | None], compute: Callable[[], Value], key: object = ()
) -> Value:
    """Return a value that is computed from several tensors and cached on the object that owns the tensors.

    Args:
        owner: an object that accepts new attributes. A copy of it also has the cached value, but other
            tensors, so the value is recomputed.
        sources: the tensors that ``compute`` reads; another tensor, or a write to one of them, causes a
            recomputation.
    """
    if any(source is not None and source.is_inference() for source in sources):
        return compute()
    state = (tuple(None if source is None else source._version for source in sources), key)
    cached = getattr(owner, _attribute(name), None)
    if cached is not None and cached[0] == state and all(map(operator.is_, cached[1], sources)):
        return cached[2]
    with usable_in_training():
        value = compute()
    setattr(owner, _attribute(name), (state, tuple(sources), value))
    return value


def _attribute(name: str) -> str:
    return f"_megatron_npu_{name}"


def lru_cache_tensors(maxsize: int) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like ``functools.lru_cache`` for functions that return tensors for use in
    training.
    """

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
    """Create ordinary tensors, without autograd history, inside the ``with`` block, even in inference
    mode.
    """
    with torch.inference_mode(False), torch.no_grad():  # the first switches gradients on
        yield
