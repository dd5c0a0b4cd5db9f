"""Provide layer specs for BERT, T5 and Retro, the models that have an encoder.

Patches ``models.bert.bert_layer_specs``, ``models.T5.t5_spec``, ``models.retro.encoder_spec`` and
``models.retro.decoder_spec`` of ``megatron.core``, which has had no Retro since 0.16.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, te_layers_present
from megatron_npu.adaptors.megatron_core.layers.norm import Norm
from megatron_npu.adaptors.megatron_core.te.redirect import force_flag_off, redirect_to_local, sibling

_BERT = "megatron.core.models.bert.bert_layer_specs"
_T5 = "megatron.core.models.T5.t5_spec"
_RETRO = "megatron.core.models.retro"


def _local_bert_layer() -> Any:
    # BertModel writes into the spec that it is given.
    return copy.deepcopy(sys.modules[_BERT].bert_layer_local_spec)


around(
    f"{_BERT}:get_bert_layer_with_transformer_engine_spec",
    condition=te_layers_present,
    why="without TransformerEngine the function raises an ImportError",
)(redirect_to_local(_local_bert_layer))


@around(
    f"{_BERT}:__getattr__",
    condition=te_layers_present,
    why=(
        "pretrain_bert.py imports bert_layer_with_transformer_engine_spec with any flags, which raises an"
        " ImportError"
    ),
)
def allow_import_of_te_layer(original: Callable[[str], Any], name: str) -> Any:
    """Allow other modules to import a TransformerEngine name.

    The script's flags decide whether it is used, and its use is logged.
    """
    return _local_bert_layer() if name == "bert_layer_with_transformer_engine_spec" else original(name)


def _block_with_local_norm(layer: str) -> Callable[..., Any]:
    """Return a function, to be recorded with ``around``, that builds a block whose final norm is a local
    norm.

    Args:
        layer: the name of the function that builds the block's layers.
    """

    def block(original: Callable[..., Any], num_layers: int) -> Any:
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        return TransformerBlockSubmodules([sibling(original, layer)()] * num_layers, layer_norm=Norm)

    return block


for _part in ("encoder", "decoder"):
    around(
        f"{_T5}:{_part}_model_with_transformer_engine_default_spec",
        condition=te_layers_present,
        why=(
            "without TransformerEngine the function raises a NameError, or returns layers made of a mock "
            "or of None, depending on the version"
        ),
    )(redirect_to_local(f"{_part}_model_with_local_spec"))

    around(
        f"{_T5}:get_t5_{_part}_with_transformer_engine_block_spec",
        condition=te_layers_present,
        why=(
            "without TransformerEngine the function raises a NameError, or returns layers made of a mock "
            "or of None, depending on the version"
        ),
    )(redirect_to_local(f"get_t5_{_part}_with_local_block_spec"))

    around(
        f"{_T5}:get_t5_{_part}_with_local_block_spec",
        condition=te_layers_present,
        upstream_bug=True,
        until=NOT_FIXED,
        why=(
            "the decoder's final norm is TransformerEngine's: without that package, the result is a "
            "NameError, a mock, or silently no norm, depending on the version"
        ),
    )(_block_with_local_norm(f"{_part}_model_with_local_spec"))

    around(
        f"{_RETRO}.{_part}_spec:get_retro_{_part}_layer_te_spec",
        versions="<0.16",
        condition=te_layers_present,
        why="without TransformerEngine the function raises a NameError",
    )(redirect_to_local(f"get_retro_{_part}_layer_local_spec"))

    around(
        f"{_RETRO}.{_part}_spec:get_retro_{_part}_block_spec",
        versions="<0.16",
        condition=te_layers_present,
        why="the function raises a NameError if TransformerEngine is requested but not installed",
    )(force_flag_off("use_transformer_engine"))
