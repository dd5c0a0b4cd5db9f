"""Stub for ``megatron.core.extensions.transformer_engine`` of megatron-core 0.12, used without
TransformerEngine.

Most modules of megatron-core try to import that module and handle the ImportError, which they still get. Two
modules import its layers unconditionally, for specs that use local layers if TransformerEngine is not
installed.
"""

from __future__ import annotations

import sys as _sys
from typing import Any as _Any

_IMPORT_WITHOUT_TRYING = (
    "megatron.core.models.vision.vit_layer_specs",
    "megatron.core.models.multimodal.llava_spec",
)
_LAYERS = ("TEDotProductAttention", "TELayerNormColumnParallelLinear", "TENorm", "TERowParallelLinear")


class _Absent:
    """A layer that cannot be built without TransformerEngine.

    Raises:
        ImportError: always.
    """

    def __init__(self, *_: _Any, **__: _Any) -> None:
        raise ImportError("TransformerEngine is not installed, so its layers cannot be built")


def __getattr__(name: str) -> type:
    """Return a layer class for ``from ... import name``, if the importing module needs it.

    Raises:
        AttributeError: another module imports the name; Python converts this to the ImportError that the
            module expects.
    """
    if name in _LAYERS and _sys._getframe(1).f_globals.get("__name__") in _IMPORT_WITHOUT_TRYING:
        return _Absent
    raise AttributeError(f"TransformerEngine is not installed, so there is no {name}")
