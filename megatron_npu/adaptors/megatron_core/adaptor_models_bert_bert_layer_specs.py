"""``megatron.core.models.bert.bert_layer_specs``: the local layer."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback import instead

_MODULE = "megatron.core.models.bert.bert_layer_specs"


def _local_layer() -> Any:
    # BertModel writes into the spec that it is given.
    return copy.deepcopy(sys.modules[_MODULE].bert_layer_local_spec)


wrap(
    f"{_MODULE}:get_bert_layer_with_transformer_engine_spec",
    condition=transformer_engine_present,
    why="without TransformerEngine it is an ImportError",
)(instead(lambda original: _local_layer))


@wrap(
    f"{_MODULE}:__getattr__",
    condition=transformer_engine_present,
    why="pretrain_bert.py imports bert_layer_with_transformer_engine_spec whatever its flags: ImportError",
)
def without_asking(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let the name be imported; the flags of the script say whether it is used, and report it."""

    @functools.wraps(original)
    def attribute(name: str) -> Any:
        if name == "bert_layer_with_transformer_engine_spec":
            return _local_layer()
        return original(name)

    return attribute
