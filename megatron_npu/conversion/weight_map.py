"""Map tensors between Hugging Face and megatron-core in both directions.

``to_hf`` also works on meta tensors: applied to the shape of Megatron's tensor it returns the required
Hugging Face shapes. Shapes: ``h`` hidden size, ``np`` query heads, ``ng`` key and value heads, ``hn`` head
size, ``f`` MLP size, ``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_npu.pretrain.checkpoint import vocab_padding


@dataclass(frozen=True)
class WeightMapping:
    """A megatron-core tensor and the Hugging Face tensors with the same values.

    Attributes:
        megatron: name in ``GPTModel``.
        hf: names in Hugging Face's files.
        to_megatron: converts Hugging Face's tensors, in the order of ``hf``, to Megatron's.
        to_hf: the inverse of ``to_megatron``, also for meta tensors.
    """

    megatron: str
    hf: tuple[str, ...]
    to_megatron: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], Sequence[Tensor]]


def direct(megatron: str, hf: str) -> WeightMapping:
    """Return the mapping for a tensor with the same layout on both sides."""
    return WeightMapping(megatron, (hf,), lambda tensors: tensors[0], lambda tensor: [tensor])


def transposed(megatron: str, hf: str) -> WeightMapping:
    """Return the mapping for a weight [out, in] that Hugging Face's Conv1D stores as [in, out]."""
    return WeightMapping(megatron, (hf,), lambda tensors: tensors[0].t(), lambda tensor: [tensor.t()])


def concatenated(megatron: str, hf: Sequence[str]) -> WeightMapping:
    """Return the mapping for a weight [n·f, h] that is the concatenation of ``n`` tensors [f, h].

    megatron-core's gated MLP has the gate first, then the other factor, as its ``glu`` splits them.
    """
    count = len(hf)
    return WeightMapping(
        megatron, tuple(hf), lambda tensors: torch.cat(list(tensors)), lambda tensor: tensor.chunk(count)
    )


def padded_vocabulary(megatron: str, hf: str, rows: int, padded_rows: int) -> WeightMapping:
    """Return the mapping for a weight [padded V, h], of which Hugging Face stores only the first V rows.

    The other rows are the mean of the real ones (see ``pretrain.checkpoint.vocab_padding``).

    Args:
        megatron, hf: names.
        rows: V.
        padded_rows: padded V.
    """

    def to_megatron(tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        row = vocab_padding.mean_row(weight, rows).to(weight.dtype)
        return torch.cat([weight, row.expand(padded_rows - rows, -1)])

    return WeightMapping(megatron, (hf,), to_megatron, lambda tensor: [tensor[:rows]])


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer, and the row layout of their weights.

    Attributes:
        queries: number of query heads, np.
        groups: number of key and value heads, ng.
        size: size of a head, hn.
        rotary_interleaved: whether Megatron's rotary embedding rotates neighbors (2i, 2i + 1). Hugging Face's
            rotates halves (i, i + hn/2), Megatron's default.
    """

    queries: int
    groups: int
    size: int
    rotary_interleaved: bool = False

    def merge_qkv(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Merge query [np·hn, …], key and value [ng·hn, …] into ``linear_qkv`` [ng·(np/ng + 2)·hn, …].

        The order is group by group: the queries that share a key, the key, the value.
        """
        query, key = self.to_megatron(query), self.to_megatron(key)
        parts = [part.reshape(self.groups, -1, *part.shape[1:]) for part in (query, key, value)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``linear_qkv`` into query, key and value; the inverse of ``merge_qkv``."""
        rows = [self.queries // self.groups * self.size, self.size, self.size]
        parts = qkv.reshape(self.groups, sum(rows), *qkv.shape[1:]).split(rows, dim=1)
        query, key, value = (part.flatten(0, 1) for part in parts)
        return self.to_hf(query), self.to_hf(key), value

    def to_megatron(self, rows: Tensor) -> Tensor:
        """Reorder the rows [heads·hn, …] of queries or keys for Megatron's rotary embedding."""
        if not self.rotary_interleaved:
            return rows
        heads = rows.reshape(-1, self.size, *rows.shape[1:])
        return torch.stack(heads.chunk(2, dim=1), dim=2).flatten(1, 2).flatten(0, 1)

    def to_hf(self, rows: Tensor) -> Tensor:
        """Reorder the rows [heads·hn, …] of queries or keys for Hugging Face's rotary embedding."""
        if not self.rotary_interleaved:
            return rows
        heads = rows.reshape(-1, self.size, *rows.shape[1:])
        return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)


def qkv(megatron: str, hf: Sequence[str], heads: Heads) -> WeightMapping:
    """Return the mapping between ``linear_qkv`` and three projections, for weights and biases."""
    return WeightMapping(megatron, tuple(hf), lambda tensors: heads.merge_qkv(*tensors), heads.split_qkv)


def qk_norm(megatron: str, hf: str, heads: Heads) -> WeightMapping:
    """Return the mapping for the norm weight [hn] that all query heads or all key heads share."""
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
