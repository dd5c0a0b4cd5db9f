"""Convert tensors between Hugging Face and megatron-core in both directions.

``to_hf`` also works on meta tensors: applied to a meta tensor with the shape of Megatron's tensor, it returns
meta tensors with the required Hugging Face shapes. The letters in the shapes are: ``h`` hidden size, ``np``
query heads, ``ng`` key and value heads, ``hn`` head size, ``f`` MLP size, ``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_npu.pretrain.checkpoint.weights import vocab_padding


@dataclass(frozen=True)
class WeightMapping:
    """A megatron-core tensor and the Hugging Face tensors that contain the same values.

    Attributes:
        megatron: the name of the tensor in ``GPTModel``.
        hf: the names of the tensors in Hugging Face's files.
        to_megatron: a function that converts Hugging Face's tensors, in the order of ``hf``, to Megatron's
            tensor.
        to_hf: the inverse of ``to_megatron``, which also supports meta tensors.
    """

    megatron: str
    hf: tuple[str, ...]
    to_megatron: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], Sequence[Tensor]]


def direct(megatron: str, hf: str) -> WeightMapping:
    """Return the mapping for a tensor that has the same layout in both formats."""
    return WeightMapping(megatron, (hf,), lambda tensors: tensors[0], lambda tensor: [tensor])


def transposed(megatron: str, hf: str) -> WeightMapping:
    """Return the mapping for a weight ``[out, in]`` that Hugging Face's Conv1D stores as ``[in, out]``."""
    return WeightMapping(megatron, (hf,), lambda tensors: tensors[0].t(), lambda tensor: [tensor.t()])


def concatenated(megatron: str, hf: Sequence[str]) -> WeightMapping:
    """Return the mapping for a weight ``[n·f, h]`` that is the concatenation of ``n`` tensors ``[f, h]``.

    In megatron-core's gated MLP, the gate comes first and the other factor second, in the order in which its
    ``glu`` function splits them.
    """
    count = len(hf)
    return WeightMapping(
        megatron, tuple(hf), lambda tensors: torch.cat(list(tensors)), lambda tensor: tensor.chunk(count)
    )


def padded_vocabulary(megatron: str, hf: str, rows: int, padded_rows: int) -> WeightMapping:
    """Return the mapping for a weight ``[padded V, h]`` of a padded vocabulary.

    Hugging Face stores only its first V rows.

    The padding rows are set to the mean of the real rows (see ``pretrain.checkpoint.vocab_padding``).

    Args:
        megatron, hf: the names of the tensor on both sides.
        rows: the vocabulary size V.
        padded_rows: the padded vocabulary size.
    """

    def to_megatron(tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        row = vocab_padding.mean_row(weight, rows).to(weight.dtype)
        return torch.cat([weight, row.expand(padded_rows - rows, -1)])

    return WeightMapping(megatron, (hf,), to_megatron, lambda tensor: [tensor[:rows]])


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer, and the order in which their weights contain rows.

    Attributes:
        queries: the number of query heads, np.
        groups: the number of key and value heads, ng.
        size: the size of a head, hn.
        rotary_interleaved: whether Megatron's rotary embedding rotates neighboring elements (2i, 2i + 1).
            Hugging Face's embedding rotates halves (i, i + hn/2), which is also Megatron's default.
    """

    queries: int
    groups: int
    size: int
    rotary_interleaved: bool = False

    def merge_qkv(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Merge query [np·hn, …], key and value [ng·hn, …] into ``linear_qkv`` [ng·(np/ng + 2)·hn, …].

        The rows are ordered by group: each group consists of the queries that share a key, then the key, then
        the value.
        """
        query, key = self.to_megatron(query), self.to_megatron(key)
        parts = [part.reshape(self.groups, -1, *part.shape[1:]) for part in (query, key, value)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``linear_qkv`` into query, key and value, which is the inverse of ``merge_qkv``."""
        rows = [self.queries // self.groups * self.size, self.size, self.size]
        parts = qkv.reshape(self.groups, sum(rows), *qkv.shape[1:]).split(rows, dim=1)
        query, key, value = (part.flatten(0, 1) for part in parts)
        return self.to_hf(query), self.to_hf(key), value

    def to_megatron(self, rows: Tensor) -> Tensor:
        """Reorder the weight rows of queries or keys, [heads·hn, …], for Megatron's rotary embedding."""
        if not self.rotary_interleaved:
            return rows
        heads = rows.reshape(-1, self.size, *rows.shape[1:])
        return torch.stack(heads.chunk(2, dim=1), dim=2).flatten(1, 2).flatten(0, 1)

    def to_hf(self, rows: Tensor) -> Tensor:
        """Reorder the weight rows of queries or keys, [heads·hn, …], for Hugging Face's rotary embedding."""
        if not self.rotary_interleaved:
            return rows
        heads = rows.reshape(-1, self.size, *rows.shape[1:])
        return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)


def qkv(megatron: str, hf: Sequence[str], heads: Heads) -> WeightMapping:
    """Return the mapping between ``linear_qkv`` and three separate projections, for weights and biases."""
    return WeightMapping(megatron, tuple(hf), lambda tensors: heads.merge_qkv(*tensors), heads.split_qkv)


def qk_norm(megatron: str, hf: str, heads: Heads) -> WeightMapping:
    """Return the mapping for the norm weight ``[hn]`` that all query heads or all key heads share."""
    return WeightMapping(
        megatron,
        (hf,),
        lambda tensors: heads.to_megatron(tensors[0]),
        lambda tensor: [heads.to_hf(tensor)],
    )


def fused_qkv(megatron: str, hf: str, heads: Heads) -> WeightMapping:
    """Return the mapping between ``linear_qkv`` and GPT-2's ``c_attn``.

    ``c_attn`` consists of three thirds, and its weight is transposed.
    """

    def transpose(tensor: Tensor) -> Tensor:
        return tensor.t() if tensor.dim() == 2 else tensor

    return WeightMapping(
        megatron,
        (hf,),
        lambda tensors: heads.merge_qkv(*transpose(tensors[0]).chunk(3)),
        lambda tensor: [transpose(torch.cat(heads.split_qkv(tensor)))],
    )
