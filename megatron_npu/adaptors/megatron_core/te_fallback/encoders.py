"""Layer specs of the models with an encoder: BERT, T5 and Retro."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.norm import Norm
from megatron_npu.adaptors.megatron_core.te_fallback.redirect import instead, named, without

_BERT = "megatron.core.models.bert.bert_layer_specs"


def _local_bert_layer() -> Any:
    # BertModel writes into the spec that it is given.
    return copy.deepcopy(sys.modules[_BERT].bert_layer_local_spec)


wrap(
    f"{_BERT}:get_bert_layer_with_transformer_engine_spec",
    condition=transformer_engine_present,
    why="without TransformerEngine it is an ImportError",
)(instead(lambda original: _local_bert_layer))


@wrap(
    f"{_BERT}:__getattr__",
    condition=transformer_engine_present,
    why="pretrain_bert.py imports bert_layer_with_transformer_engine_spec whatever its flags: ImportError",
)
def without_asking(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let the name be imported; the flags of the script say whether it is used, and report it."""

    @functools.wraps(original)
    def attribute(name: str) -> Any:
        if name == "bert_layer_with_transformer_engine_spec":
            return _local_bert_layer()
        return original(name)

    return attribute


_T5 = "megatron.core.models.T5.t5_spec"
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
        f"{_T5}:{_part}_model_with_transformer_engine_default_spec",
        condition=transformer_engine_present,
        why=_WHY,
    )(instead(named(f"{_part}_model_with_local_spec")))
    wrap(
        f"{_T5}:get_t5_{_part}_with_transformer_engine_block_spec",
        condition=transformer_engine_present,
        why=_WHY,
    )(instead(named(f"get_t5_{_part}_with_local_block_spec")))
    wrap(
        f"{_T5}:get_t5_{_part}_with_local_block_spec",
        condition=transformer_engine_present,
        why="its final norm is TransformerEngine's: a NameError, a mock, or silently none, by version",
    )(_with_final_norm(f"{_part}_model_with_local_spec"))


for _part in ("encoder", "decoder"):
    _layer = f"get_retro_{_part}_layer"
    wrap(
        f"megatron.core.models.retro.{_part}_spec:{_layer}_te_spec",
        versions="<0.16",
        condition=transformer_engine_present,
        why="without TransformerEngine it ends in a NameError",
    )(instead(named(f"{_layer}_local_spec")))
    wrap(
        f"megatron.core.models.retro.{_part}_spec:get_retro_{_part}_block_spec",
        versions="<0.16",
        condition=transformer_engine_present,
        why="asked for TransformerEngine without it, it ends in a NameError",
    )(without("use_transformer_engine"))
