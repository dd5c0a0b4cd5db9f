"""Describe the result of recognizing a module, and provide checks that all replacements use."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_npu import devices


class Replacement(NamedTuple):
    """A forward method that replaces the forward method of a module.

    Attributes:
        what: the module's part in the model, such as ``norm``.
        by: the name of the operation in docs/reference/operations.md, with a remark if needed.
        forward: called with the module and the arguments of the module's forward. It is a module-level
            function, so that a deep copy of the model gets its own.
        notes: attributes to set on the module for it.
    """

    what: str
    by: str
    forward: Callable[..., Any]
    notes: Mapping[str, Any] = MappingProxyType({})


class Left(NamedTuple):
    """A module that is left unchanged although it looks replaceable, with the reason."""

    what: str
    why: str


Found = Replacement | Left | None


def bound_elsewhere(tensor: Tensor) -> bool:
    """Return True if operations are bound to another device, so that a module must run its original forward
    method.

    This is also the case while a graph is compiled: the compiler fuses element-wise work better than any
    operation.
    """
    return torch.compiler.is_compiling() or tensor.device.type != devices.current().name


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward method of a module's class, instead of its replacement."""
    return type(module).forward(module, *args, **kwargs)


def has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a module of class ``kind`` or of a subclass computes the same result as ``kind``."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the names of globals and attributes that the forward method of a module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


@contextlib.contextmanager
def called_as(name: str, ours: Callable[..., Any], module: nn.Module) -> Iterator[None]:
    """Replace a function of ``torch.nn.functional`` in the current thread while a module's forward method
    runs.

    A ``TorchFunctionMode`` is not used: it would intercept every torch call, including those in the guards of
    compiled blocks, and dynamo (torch 2.13) would compile a graph for each number compared there.

    Args:
        name: the name of the function.
        ours: called with the original function and its arguments.
        module: the module whose forward calls the function, as ``F.name`` or by its bare name.
    """
    theirs = _plain(getattr(F, name))
    own_file = inspect.unwrap(type(module).forward).__globals__
    places = [vars(F), *([own_file] if _plain(own_file.get(name)) is theirs else [])]
    outer = vars(_ours).get(name)
    setattr(_ours, name, ours)
    _count(places, name, theirs, 1)
    try:
        yield
    finally:
        _count(places, name, theirs, -1)
        setattr(_ours, name, outer)


_ours = threading.local()  # by the name of a function, what a thread calls instead
_ASKS = "megatron_npu_asks"  # a function that asks has itself there: who wraps it copies its attributes
_lock = threading.Lock()  # of the counter below
_blocks: collections.Counter[tuple[int, str]] = collections.Counter()  # which overlap where threads do


def _plain(function: Any) -> Any:
    asks = function is not None and getattr(function, _ASKS, None) is function
    return function.__wrapped__ if asks else function


def _count(places: list[dict[str, Any]], name: str, theirs: Callable[..., Any], more: int) -> None:
    """Count the active blocks that replace a function, and install or remove the function that looks up
    replacements.

    Inside any block, the dispatching function is installed.
    """
    with _lock:
        for place in places:
            _blocks[id(place), name] += more
            place[name] = _asking(name, theirs) if _blocks[id(place), name] else theirs


@functools.cache
def _asking(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that, at each call, looks up the replacement for the current thread."""

    @functools.wraps(theirs)
    def asking(*args: Any, **kwargs: Any) -> Any:
        ours = vars(_ours).get(name)
        if ours is None:
            return theirs(*args, **kwargs)
        setattr(_ours, name, None)  # the operation may call it
        try:
            return ours(theirs, *args, **kwargs)
        finally:
            setattr(_ours, name, ours)

    setattr(asking, _ASKS, asking)
    return asking


def is_leaf(module: nn.Module) -> bool:
    """Return True if the module has no submodules."""
    return next(module.children(), None) is None


def agrees(actual: Any, expected: Tensor, tolerance: float) -> bool:
    """Return True if the result of a test call equals ``expected``, to within a fraction of the largest
    value.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return False
    error = (actual.double() - expected.double()).abs().max()
    return bool(error <= tolerance * expected.double().abs().max())
