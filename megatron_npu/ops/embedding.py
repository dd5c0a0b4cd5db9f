"""Look up word embeddings in a table that may be partitioned by vocabulary over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.dispatch import Make, Operation

# Takes a table, the numbers [...] of the rows that were read, and their gradients [..., h].
KeepRows = Callable[[Tensor, Tensor, Tensor], bool]


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    vocab_start: int,
    vocab_end: int,
    *,
    split: bool = True,
    keep_rows: KeepRows | None = None,
) -> Tensor:
    """Return this rank's part of the embedding of the given ids.

    Tokens in other ranks' parts get zeros.

    Args:
        ids: ``[...]``, token ids of the whole vocabulary.
        weight: ``[vocab_end - vocab_start, h]``, this rank's rows of the table.
        vocab_start, vocab_end: the range of ids that this rank holds.
        split: False if the range is the whole vocabulary, so that nothing is masked.
        keep_rows: called on a cpu with the gradients of the rows read, before a zero-filled table is
            allocated; if it returns True, it has accumulated them itself and the weight gets no gradient.

    Returns:
        ``[..., h]``, to be summed over the tensor-parallel group.

    Boolean indexing is avoided: the size of its result is known only on the device, so the host would wait.
    Gradients of repeated tokens are summed in fp32, on a cpu in token order; torch sums 16-bit gradients in
    16 bits there, and the sum of a frequent token stops growing.
    """
    return _embedding(ids, weight, vocab_start, vocab_end, split, keep_rows)


def _masked(ids: Tensor, start: int, end: int, split: bool) -> tuple[Tensor, Tensor | None]:
    """Return row numbers of the given ids in this rank's part of the table, and a mask of the ids outside
    this part.

    The mask is None if there are no such ids.
    """
    if not split:
        return ids, None
    elsewhere = (ids < start) | (ids >= end)
    return (ids - start).masked_fill_(elsewhere, 0), elsewhere


def _reference(
    ids: Tensor, weight: Tensor, start: int, end: int, split: bool, keep_rows: KeepRows | None
) -> Tensor:
    rows, elsewhere = _masked(ids, start, end, split)
    output = F.embedding(rows, weight)
    return output if elsewhere is None else output.masked_fill(elsewhere.unsqueeze(-1), 0.0)


_embedding = Operation("vocab_parallel_embedding", _reference, group="embedding")


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        start: int,
        end: int,
        split: bool,
        keep_rows: KeepRows | None,
    ) -> Tensor:
        rows, elsewhere = _masked(ids, start, end, split)
        ctx.save_for_backward(rows, elsewhere)
        ctx.table_rows, ctx.weight, ctx.keep_rows = weight.size(0), weight, keep_rows
        output = F.embedding(rows, weight)
        return output if elsewhere is None else output.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, elsewhere = ctx.saved_tensors
        if elsewhere is not None:
            grad = grad.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        on_cpu = grad.device.type == "cpu"
        if on_cpu and ctx.keep_rows is not None and ctx.keep_rows(ctx.weight, rows, grad):
            return (None,) * 6
        if on_cpu and grad.dtype in (torch.bfloat16, torch.float16):
            return None, _sum_in_fp32(grad, rows, ctx.table_rows), None, None, None, None
        # by sorting on cuda; in the order of the tokens on a cpu
        result = torch.ops.aten.embedding_dense_backward(grad, rows, ctx.table_rows, -1, False)
        return None, result, None, None, None, None


def _sum_in_fp32(grad: Tensor, rows: Tensor, table_rows: int) -> Tensor:
    """Sum the gradients ``[..., h]`` by table row in fp32, into ``[table_rows, h]``.

    Only rows that occur are summed in fp32.
    """
    present, position = rows.reshape(-1).unique(return_inverse=True)
    width = grad.size(-1)
    sums = torch.zeros((present.numel(), width), dtype=torch.float32)
    sums.index_add_(0, position, grad.reshape(-1, width).float())
    return grad.new_zeros((table_rows, width)).index_copy_(0, present, sums.to(grad.dtype))


_embedding.on("cpu", note="sums 16-bit gradients in fp32¹")(_Embedding.apply)
_embedding.on("cuda", note="sorts indices for the gradient")(_Embedding.apply)
_embedding.on("npu", note="torch_npu's kernel")(_Embedding.apply)


@_embedding.example()
def _example(make: Make) -> Tensor:
    table = make(64, 128)
    ids = torch.arange(256, device=table.device).view(8, 32) % 96
    return vocab_parallel_embedding(ids, table, 32, 96)
