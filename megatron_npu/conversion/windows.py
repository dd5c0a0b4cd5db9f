"""Convert attention windows, with their sizes and layers, between ``config.json`` and flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from megatron_npu.conversion import unsupported
from megatron_npu.conversion.config import Config
from megatron_npu.pretrain.flags.frozen_flags import Flags

# Which layers have one: all; those from max_window_layers on; the first, third … of the layers before that.
Layers = Literal["all", "late", "odd"]
_WHOLE, _WINDOW = "full_attention", "sliding_attention"  # of layer_types
_LIMIT = 28  # max_window_layers where config.json has no such key


def flags(config: Config, usual: int, switch: bool, which: Layers) -> dict[str, object]:
    """Return the flags for the attention windows that ``config.json`` describes.

    ``sliding_window`` also counts the query's own token.

    Args:
        config: the keys of ``config.json``.
        usual: the default of ``sliding_window``; 0 means no window.
        switch: whether ``use_sliding_window`` enables windows.
        which: which layers have a window if ``layer_types`` is absent.

    Raises:
        UsageError: some keys contradict each other.
    """
    layers = _of_layers(config, usual, switch, which)
    if not any(layers):
        config.ignore("sliding_window")
        return {}
    result: dict[str, object] = {"--pre-tockens": config.number("sliding_window", usual or None) - 1}
    if not all(layers):
        result["--window-attn-skip-freq"] = str([int(layer) for layer in layers]).replace(" ", "")
    return result


def _of_layers(config: Config, usual: int, switch: bool, which: Layers) -> list[bool]:
    """Return, for each layer, whether it has a window."""
    layers = config.number("num_hidden_layers")
    there = not config.is_null("sliding_window") and (usual > 0 or config.has("sliding_window"))
    if not switch:
        return [there] * layers
    there = config.require("use_sliding_window", False, True) and there
    limit = config.whole("max_window_layers", _LIMIT)
    expected = [there and _has_window(number, limit, which) for number in range(layers)]
    kinds = config.items("layer_types")
    return _of_kinds(config, kinds, expected, free=there and which != "all") if kinds else expected


def _has_window(number: int, limit: int, which: Layers) -> bool:
    """Return True if a layer has a window according to the keys other than ``layer_types``."""
    if which == "late":
        return number >= limit
    return which == "all" or (number < limit and number % 2 == 0)


def _of_kinds(config: Config, kinds: Sequence[Any], expected: list[bool], *, free: bool) -> list[bool]:
    """Return the windows that ``layer_types`` specifies.

    Unless ``free`` is set, they must match the other keys.
    """
    found = [kind == _WINDOW for kind in kinds]
    known = len(kinds) == len(expected) and all(kind in (_WHOLE, _WINDOW) for kind in kinds)
    if not known or (found != expected and not free):
        raise config.refusal(
            "layer_types", kinds, f"{json.dumps(_kinds(expected))}, as the other keys specify"
        )
    return found


def _kinds(layers: list[bool]) -> list[str]:
    return [_WINDOW if layer else _WHOLE for layer in layers]


def keys(args: Flags, switch: bool, which: Layers) -> dict[str, Any]:
    """Return the keys of ``config.json`` that describe the windows, which is the inverse of ``flags``."""
    before, layers = unsupported.window(args), unsupported.windows(args)
    window = None if before is None else before + 1
    if not switch:
        return {"sliding_window": window}
    if not any(layers):
        return {"use_sliding_window": False, "sliding_window": None}
    result = {"use_sliding_window": True, "sliding_window": window}
    if which == "all":
        return result
    limit = layers.index(True) if which == "late" else args.num_layers
    return result | {"max_window_layers": limit, "layer_types": _kinds(layers)}
