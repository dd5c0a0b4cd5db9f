"""Disable KV caches during training, because only generation needs them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn


def leave_caches_to_generation(model: nn.Module) -> None:
    """Make a Transformers model use a KV cache only if a call requests it.

    Decoders have ``use_cache`` set in their configuration, so each forward pass would copy all keys and
    values into an unused cache, and each layer of a compiled model would need its own graph, because the
    layers have different indices in the cache. The configuration is not changed, and ``generate`` requests
    the cache explicitly.

    Args:
        model: a Transformers model, possibly wrapped by peft; other models are not changed.
    """
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # peft's wrapper
        inner = inner.get_base_model()
    names = list(inspect.signature(type(inner).forward).parameters)
    if "use_cache" not in names or not hasattr(getattr(inner, "config", None), "use_cache"):
        return
    place = names.index("use_cache") - 1  # behind self
    inner.register_forward_pre_hook(functools.partial(_without_cache, place), with_kwargs=True)


_CACHES = ("cache", "past_key_values")  # Transformers' name since 5.24, and before


def _without_cache(
    place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set ``use_cache=False`` unless the caller sets it or passes a cache."""
    if len(args) <= place and all(kwargs.get(name) is None for name in _CACHES):
        kwargs.setdefault("use_cache", False)
    return args, kwargs
