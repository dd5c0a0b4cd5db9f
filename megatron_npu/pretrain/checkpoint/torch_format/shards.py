"""Join and split tensor-parallel weights, which are identified by their megatron-core names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

# Rows of the output are shared, or columns of the input; what is not named every rank has.
_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.weight|.*\.linear_(?:qkv|fc1)\.(?:weight|bias)"
)
_COLUMNS = re.compile(r".*\.linear_(?:proj|fc2)\.weight")
_FIRST_OF_MLP = re.compile(r".*\.mlp\.linear_fc1\.(?:weight|bias)")


def join(name: str, parts: Sequence[Tensor], *, gated: bool) -> Tensor:
    """Join the tensor-parallel parts of a weight.

    Args:
        name: megatron-core's name.
        parts: the part of each tensor-parallel rank.
        gated: whether the MLP is gated; if so, each part consists of a part of the gate followed by a part of
            the other factor.
    """
    if len(parts) == 1 or not (_ROWS.fullmatch(name) or _COLUMNS.fullmatch(name)):
        return parts[0]
    if _COLUMNS.fullmatch(name):
        return torch.cat(list(parts), dim=1)
    if gated and _FIRST_OF_MLP.fullmatch(name):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[number] for number in (0, 1) for half in halves])
    return torch.cat(list(parts))


def cut(name: str, tensor: Tensor, size: int, *, gated: bool) -> list[Tensor]:
    """Split a weight into the parts of ``size`` tensor-parallel ranks, the inverse of ``join``."""
    if _COLUMNS.fullmatch(name):
        return list(tensor.chunk(size, dim=1))
    if not _ROWS.fullmatch(name):
        return [tensor] * size
    if gated and _FIRST_OF_MLP.fullmatch(name):
        gate, other = (half.chunk(size) for half in tensor.chunk(2))
        return [torch.cat(pair) for pair in zip(gate, other, strict=True)]
    return list(tensor.chunk(size))


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return a weight ``[V, h]`` of the vocabulary, padded or truncated to the given number of rows.

    Padding is removed, or zeros are added.
    """
    if tensor.size(0) >= rows:
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.size(0), tensor.size(1))])
