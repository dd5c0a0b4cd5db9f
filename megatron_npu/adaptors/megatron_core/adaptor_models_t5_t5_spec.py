"""``megatron.core.models.T5.t5_spec``: local layers and blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.norm import Norm
from megatron_npu.adaptors.megatron_core.te_fallback import instead, named

_MODULE = "megatron.core.models.T5.t5_spec"
_WHY = "without TransformerEngine it is a NameError, or gives layers of a mock or of None, by version"


def _with_final_norm(layer: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrap that makes a block of local layers, with a norm that is local as well."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def block(num_layers: int) -> Any:
            from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

            return TransformerBlockSubmodules([named(layer)(original)()] * num_layers, layer_norm=Norm)

        return block

    return wrap


for _part in ("encoder", "decoder"):
    wrap(
        f"{_MODULE}:{_part}_model_with_transformer_engine_default_spec",
        condition=transformer_engine_present,
        why=_WHY,
    )(instead(named(f"{_part}_model_with_local_spec")))
    wrap(
        f"{_MODULE}:get_t5_{_part}_with_transformer_engine_block_spec",
        condition=transformer_engine_present,
        why=_WHY,
    )(instead(named(f"get_t5_{_part}_with_local_block_spec")))
    wrap(
        f"{_MODULE}:get_t5_{_part}_with_local_block_spec",
        condition=transformer_engine_present,
        why="its final norm is TransformerEngine's: a NameError, a mock, or silently none, by version",
    )(_with_final_norm(f"{_part}_model_with_local_spec"))
