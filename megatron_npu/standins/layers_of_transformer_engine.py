"""Stand-in for ``megatron.core.extensions.transformer_engine`` of 0.12 where TransformerEngine is absent.

Most of megatron-core takes an ImportError of that module for an answer, and still gets one. Two modules do
not ask: they name its layers for specs which, without TransformerEngine, are made of local layers.
"""

from __future__ import annotations

import sys as _sys
from typing import Any as _Any

_WHO_DOES_NOT_ASK = (
    "megatron.core.models.vision.vit_layer_specs",
    "megatron.core.models.multimodal.llava_spec",
)
_LAYERS = ("TEDotProductAttention", "TELayerNormColumnParallelLinear", "TENorm", "TERowParallelLinear")


class _Absent:
    """A layer that cannot be built.

    Raises:
        ImportError: always.
    """

    def __init__(self, *_: _Any, **__: _Any) -> None:
        raise ImportError("TransformerEngine is not installed: its layers cannot be built")


def __getattr__(name: str) -> type:
    """Answer ``from ... import name``, whose caller is the module that imports.

    Raises:
        AttributeError: somebody else imports, who is told by it (as ImportError) that there is none.
    """
    if name in _LAYERS and _sys._getframe(1).f_globals.get("__name__") in _WHO_DOES_NOT_ASK:
        return _Absent
    raise AttributeError(f"TransformerEngine is not installed: no {name}")
