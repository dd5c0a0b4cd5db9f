"""Convert parameter names and layouts between 285068c8 (and older versions) and megatron-core."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

# In a layer of 285068c8 -> in one of megatron-core. Before, self_attention was called attention.
_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_OUTSIDE = {
    "language_model.embedding.word_embeddings": "embedding.word_embeddings",
    "language_model.embedding.position_embeddings": "embedding.position_embeddings",
    "language_model.output_layer": "output_layer",
}
_OLD_LAYER = re.compile(r"language_model\.(?:encoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OLD_NORM = re.compile(r"language_model\.(?:encoder|transformer)\.final_layernorm\.(weight|bias)")
# The last stage's copy of tied embeddings; buffers that follow from the arguments.
_COPIES = re.compile(
    r"word_embeddings(?:_for_head)?\.weight|.*(?:\._extra_state|inv_freq|\.attention\.(?:masked_)?bias)"
)
# Transformer Engine keeps a norm inside the linear layer behind it.
_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
_DEPTH = 4  # of tables within tables; 285068c8 has three
_QKV = re.compile(r".*\.self_attention\.linear_qkv\.(?:weight|bias)")


def of_core(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a model chunk under megatron-core's names.

    Layers are numbered within the chunk.

    Unknown names are kept, so that the caller can detect them.

    Args:
        model: the entry ``model`` or ``model0``, … of a rank's file: nested in 285068c8, flat in
            megatron-core.
    """
    return {_of_core(name): tensor for name, tensor in _flat(model) if not _COPIES.fullmatch(name)}


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and depth < _DEPTH:
            yield from _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}".removeprefix("module."), value


def _of_core(name: str) -> str:
    layer, (module, _, kind) = _OLD_LAYER.fullmatch(name), name.rpartition(".")
    if layer and layer[2] in _LAYER:
        return f"decoder.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    if norm := _OLD_NORM.fullmatch(name):
        return f"decoder.final_layernorm.{norm[1]}"
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    for fused, own in _FUSED_NORMS.items():
        name = name.replace(fused, own)
    return name


def to_285068c8(name: str) -> list[str]:
    """Return the path of keys under which 285068c8 stores a weight, given its megatron-core name.

    Raises:
        KeyError: 285068c8 has no such weight.
    """
    module, _, kind = name.rpartition(".")
    old = {new: old for old, new in {**_OUTSIDE, **_LAYER}.items() if not old.startswith("attention.")}
    if module == "decoder.final_layernorm":
        return ["language_model", "encoder", f"final_layernorm.{kind}"]
    if layer := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", module):
        return ["language_model", "encoder", f"layers.{layer[1]}.{old[layer[2]]}.{kind}"]
    return [*old[module].split("."), kind]


def in_todays_order(name: str, tensor: Tensor, version: float, heads: int) -> Tensor:
    """Reorder the rows of ``linear_qkv`` so that the query, key and value of each head are adjacent.

    Other weights are not changed.

    Args:
        name: megatron-core's name.
        tensor: [3·np·hn, …], the part of one rank.
        version: ``checkpoint_version``; the factor 3 is outermost before version 1 and innermost before
            version 2.
        heads: np, the number of heads of one rank.
    """
    if version >= 2 or not _QKV.fullmatch(name):
        return tensor
    rest = tensor.shape[1:]
    if version < 1:
        return tensor.reshape(3, heads, -1, *rest).transpose(0, 1).flatten(0, 2)
    return tensor.reshape(heads, -1, 3, *rest).transpose(1, 2).flatten(0, 2)


def layers_in(names: Mapping[str, Any]) -> set[int]:
    """Return the layer numbers that occur in parameter names."""
    found = (re.match(r"decoder\.layers\.(\d+)\.", name) for name in names)
    return {int(match[1]) for match in found if match}


def renumbered(name: str, by: int) -> str:
    """Return a parameter name with a shifted layer number.

    Names without a layer number are not changed.
    """
    return re.sub(r"^(decoder\.layers\.)(\d+)", lambda match: f"{match[1]}{int(match[2]) + by}", name)
