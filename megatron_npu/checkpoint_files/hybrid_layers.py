"""Read the checkpoint of a hybrid model into a GPT model, where one GPT layer corresponds to two hybrid
layers.

Megatron-LM deprecates ``GPTModel`` in favor of ``HybridModel``, whose layer pattern ``*-*-`` (``*E*E`` with
experts) computes the same as a GPT with two layers. The hybrid stores the attention of layer *i* in its layer
*2i*, and the MLP in *2i + 1*. Upstream's main branch loads a GPT checkpoint into a hybrid, not the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from megatron_npu.base.errors import UsageError

_FINAL_NORM, _OF_GPT = "decoder.final_norm.", "decoder.final_layernorm."
# of a GPT whose layers are alike the number is an axis, not in the key
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?")
_OF_ATTENTION = ("input_layernorm.", "self_attention.")
_AS_A_GPT = re.compile(r"(\*-)+|(\*E)+")


def layers_of_gpt(pattern: str) -> int:
    """Return the number of layers of the GPT model that is equivalent to a hybrid model with the given
    ``pattern``.

    Args:
        pattern: the value of ``--hybrid-layer-pattern``, with ``|`` between pipeline stages.

    Raises:
        UsageError: no GPT model is equivalent.
    """
    layers = pattern.replace("|", "")
    if not _AS_A_GPT.fullmatch(layers):
        raise UsageError(
            f"the checkpoint contains a hybrid model with the layer pattern {pattern}, which cannot be "
            "loaded as a GPT model; only alternating attention and MLP layers (*-*-), or attention and "
            "experts (*E*E), are supported",
            remedy="Load it with pretrain_hybrid.py.",
        )
    return len(layers) // 2


def is_of_hybrid(keys: Iterable[str]) -> bool:
    """Return True if the names of the weights in a checkpoint are those of a hybrid model."""
    return any(key.startswith(_FINAL_NORM) for key in keys)


def point_at(wanted: dict[str, Any]) -> None:
    """Map the weights and the optimizer state of a GPT model to their names in a hybrid model's checkpoint.

    Args:
        wanted: the ``sharded_state_dict`` of a model or optimizer. Keys and axes are changed in place; the
            names under which the model finds its weights are not changed.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    dict_list_map_inplace(_moved, wanted)


def _moved(entry: Any) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    if not isinstance(entry, ShardedObject | ShardedTensor | ShardedTensorFactory):
        return entry
    found = _LAYER.search(entry.key)
    if found is None:
        entry.key = entry.key.replace(_OF_GPT, _FINAL_NORM)
        return entry
    rest = entry.key[found.end() :]
    layer = _layer_of(entry) if found[1] is None else int(found[1])
    place = 2 * layer + (not rest.startswith(_OF_ATTENTION))
    entry.key = f"{entry.key[: found.start()]}decoder.layers.{place}.{rest}"
    return _without_layers(entry) if found[1] is None else entry


def _layer_of(entry: Any) -> int:
    """Return the layer number of an entry, which is the entry's offset along the first axis."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    while isinstance(entry, ShardedTensorFactory):
        entry = next(iter(nested_values(entry.build())))
    return int(entry.global_offset[0])


def _without_layers(entry: Any) -> Any:
    """Remove the layer axis, including from tensors that a factory builds later."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(entry, ShardedTensorFactory):
        build = entry.build_fn

        def built(*args: Any) -> Any:
            parts = build(*args)
            dict_list_map_inplace(_without_layers, parts)
            return parts

        entry.build_fn = built
    elif isinstance(entry, ShardedTensor):
        entry.global_shape, entry.global_offset = entry.global_shape[1:], entry.global_offset[1:]
        entry.axis_fragmentations = entry.axis_fragmentations[1:]
        entry.prepend_axis_num -= 1
    else:
        entry.global_shape = entry.global_shape[1:] or (1,)
        entry.global_offset = entry.global_offset[1:] or (0,)
    return entry
