"""How tensors of Hugging Face make one tensor of megatron-core, and how it is taken apart again.

A rule knows both ways, and its ``split`` works on meta tensors too: applied to the shape of Megatron's tensor
it says which shapes Hugging Face's must have. Shapes: ``h`` hidden size, ``np`` query heads, ``ng`` key and
value heads, ``hn`` head size, ``f`` size of the MLP, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_npu.training import vocab_padding


@dataclass(frozen=True)
class Rule:
    """One tensor of megatron-core and the tensors of Hugging Face that hold the same numbers.

    Attributes:
        megatron: name in ``GPTModel``.
        hf: names in the files of Hugging Face.
        join: Hugging Face's tensors, in the order of ``hf`` -> Megatron's.
        split: the inverse of ``join``, also for meta tensors.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


def same(megatron: str, hf: str) -> Rule:
    """Return the rule of a tensor that both sides lay out alike."""
    return Rule(megatron, (hf,), lambda tensors: tensors[0], lambda tensor: [tensor])


def transposed(megatron: str, hf: str) -> Rule:
    """Return the rule of a weight [out, in] that Hugging Face's Conv1D keeps as [in, out]."""
    return Rule(megatron, (hf,), lambda tensors: tensors[0].t(), lambda tensor: [tensor.t()])


def stacked(megatron: str, hf: Sequence[str]) -> Rule:
    """Return the rule of a weight [n·f, h] that is ``n`` tensors [f, h], one below the other.

    megatron-core's gated MLP has the gate above and the other factor below, as its ``glu`` cuts them.
    """
    count = len(hf)
    return Rule(megatron, tuple(hf), lambda tensors: torch.cat(list(tensors)), lambda t: t.chunk(count))


def padded(megatron: str, hf: str, rows: int, padded_rows: int) -> Rule:
    """Return the rule of a weight [padded V, h], of which Hugging Face keeps the first V rows alone.

    The other rows are the mean of the real ones (``training.vocab_padding`` says why).
    """

    def join(tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        row = vocab_padding.mean_row(weight, rows).to(weight.dtype)
        return torch.cat([weight, row.expand(padded_rows - rows, -1)])

    return Rule(megatron, (hf,), join, lambda tensor: [tensor[:rows]])


@dataclass(frozen=True)
class Heads:
    """Numbers of heads.

    Attributes:
        queries: query heads, np.
        groups: key and value heads, ng.
        size: numbers of a head, hn.
        interleaved: Megatron's rotary embedding turns neighbours (2i, 2i + 1). Hugging Face's turns halves
            (i, i + hn/2), as Megatron's does by default.
    """

    queries: int
    groups: int
    size: int
    interleaved: bool = False

    def join(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return ``linear_qkv`` [ng·(np/ng + 2)·hn, …] of query [np·hn, …], key and value [ng·hn, …].

        Group by group: the queries that share a key, the key, the value.
        """
        query, key = self._turn(query, self._to_neighbours), self._turn(key, self._to_neighbours)
        parts = [part.reshape(self.groups, -1, *part.shape[1:]) for part in (query, key, value)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of ``linear_qkv``; the inverse of ``join``."""
        rows = [self.queries // self.groups * self.size, self.size, self.size]
        parts = qkv.reshape(self.groups, sum(rows), *qkv.shape[1:]).split(rows, dim=1)
        query, key, value = (part.flatten(0, 1) for part in parts)
        return self._turn(query, self._to_halves), self._turn(key, self._to_halves), value

    def join_norm(self, weight: Tensor) -> Tensor:
        """Return the weight [hn] of a norm of every head, whose order is that of the head's rows."""
        return self._turn(weight, self._to_neighbours)

    def split_norm(self, weight: Tensor) -> Tensor:
        """Return the inverse of ``join_norm``."""
        return self._turn(weight, self._to_halves)

    def _turn(self, rows: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
        """Reorder the rows [heads·hn, …] within each head, if the two sides disagree."""
        if not self.interleaved:
            return rows
        return order(rows.reshape(-1, self.size, *rows.shape[1:])).flatten(0, 1)

    @staticmethod
    def _to_neighbours(heads: Tensor) -> Tensor:
        return torch.stack(heads.chunk(2, dim=1), dim=2).flatten(1, 2)

    @staticmethod
    def _to_halves(heads: Tensor) -> Tensor:
        return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1)


def qkv(megatron: str, hf: Sequence[str], heads: Heads) -> Rule:
    """Return the rule of ``linear_qkv`` and three projections; for weights and for biases."""
    return Rule(megatron, tuple(hf), lambda tensors: heads.join(*tensors), heads.split)


def head_norm(megatron: str, hf: str, heads: Heads) -> Rule:
    """Return the rule of the weight [hn] of a norm of every query's or key's head."""
    return Rule(
        megatron,
        (hf,),
        lambda tensors: heads.join_norm(tensors[0]),
        lambda tensor: [heads.split_norm(tensor)],
    )


def fused_qkv(megatron: str, hf: str, heads: Heads) -> Rule:
    """Return the rule of ``linear_qkv`` and GPT-2's ``c_attn``: thirds, and for the weight transposed."""

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t() if tensor.dim() == 2 else tensor

    return Rule(
        megatron,
        (hf,),
        lambda tensors: heads.join(*turned(tensors[0]).chunk(3)),
        lambda tensor: [turned(torch.cat(heads.split(tensor)))],
    )
