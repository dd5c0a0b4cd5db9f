"""Compute cross-entropy over a vocabulary that may be partitioned across tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.compiled.abi import overlaps
from megatron_npu.ops.dispatch import Make, Operation, takes_kernel
from megatron_npu.ops.exponential import exponential_of_difference_
from megatron_npu.ops.tiling import whole_row_slices
from megatron_npu.ops.triton import cross_entropy as kernels


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``logsumexp(logits) - logits[target]`` for each token, with a vocabulary that is partitioned
    across ranks.

    Args:
        logits: ``[..., v]``, this rank's part of the vocabulary; fp32, bf16 or fp16. **Backward overwrites it
            with the gradient**, as upstream does in forward, to save a second buffer of its size: do not read
            it after backward.
        target: ``[...]``, token ids of the whole vocabulary.
        vocab_start: the id of the first token of this rank's part.
        vocab_size: the size of the whole vocabulary.
        group: the tensor-parallel group. If it is None or a group of one, ``logits`` covers the whole
            vocabulary.
        label_smoothing: the probability mass given to the wrong tokens, in [0, 1), distributed as in upstream
            (Szegedy et al. 2016 with K - 1 in place of K), but over the *whole* vocabulary: megatron-core
            0.16 averages over each rank's part only, so its loss depends on the parallel size.

    Returns:
        ``[...]``, fp32.

    Everything is computed in fp32, tile by tile; the additional memory is O(tokens).
    """
    return _cross_entropy(logits, target, vocab_start, vocab_size, group, label_smoothing)


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Return ``logsumexp(logits) - logits[target]`` for each token, and 0 for ignored targets.

    This is ``F.cross_entropy`` without reduction, but 16-bit logits are converted to fp32 tile by tile, not
    as a whole.

    Args:
        logits: ``[..., v]``, fp32, bf16 or fp16; not changed, unlike in ``vocab_parallel_cross_entropy``.
        target: ``[...]``, token ids.
        ignore_index: target value of tokens to ignore.

    Returns:
        ``[...]``, fp32. The gradient is in the dtype of ``logits``, zero for ignored tokens.
    """
    return _plain_cross_entropy(logits, target, ignore_index)


def _plain_reference(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    ignored = target == ignore_index
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    predicted = z.gather(-1, target.masked_fill(ignored, 0)[..., None]).squeeze(-1)
    return (z.logsumexp(-1) - predicted).masked_fill(ignored, 0.0)


_WORTH_GATHERING = 0.25  # of the rows ignored: with fewer, all are computed

_plain_cross_entropy = Operation("cross_entropy", _plain_reference)


class _PlainCrossEntropy(torch.autograd.Function):
    """Cross-entropy that, on a CPU, skips rows whose target is ignored.

    On other devices, skipping rows would block the host.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        flat, ids = logits.reshape(-1, logits.size(-1)), target.reshape(-1)
        ctx.words = None
        if _by_kernel("cross_entropy", logits):
            ctx.words = kernels.Vocabulary(0, flat.size(1), ignored=ignore_index)
            flat, ids = _rows_apart(flat), ids.contiguous()
            loss, normalizer = kernels.whole(flat, ids, ctx.words)
            ctx.save_for_backward(logits, ids, normalizer)
            return loss.resize_(target.shape)
        ignored = ids == ignore_index
        ids = ids.masked_fill(ignored, 0)
        normalizer = torch.zeros(ids.shape, dtype=_precise_dtype(flat), device=flat.device)
        for rows in _tiles_with_target(flat, ignored):
            normalizer[rows] = flat[rows].to(normalizer.dtype).logsumexp(-1)
        loss = normalizer - flat.gather(1, ids[:, None]).squeeze(1)
        ctx.save_for_backward(logits, ids, ignored, normalizer)
        return loss.masked_fill_(ignored, 0.0).resize_(target.shape)  # not a view, see below

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        if ctx.words is not None:
            logits, ids, normalizer = ctx.saved_tensors
            flat = _rows_apart(logits.detach().reshape(-1, logits.size(-1)))
            grad = torch.empty_like(flat, memory_format=torch.contiguous_format)
            kernels.gradient(_of_losses(grad_output), flat, ids, normalizer, ctx.words, grad)
            return grad.view(logits.shape), None, None
        logits, ids, ignored, normalizer = ctx.saved_tensors
        flat = logits.reshape(-1, logits.size(-1))
        grad = torch.zeros_like(flat) if _few_have_a_target(flat, ignored) else torch.empty_like(flat)
        factor = grad_output.reshape(-1).to(normalizer.dtype).masked_fill(ignored, 0.0)
        for rows in _tiles_with_target(flat, ignored):
            part = exponential_of_difference_(
                flat[rows].to(normalizer.dtype, copy=True), normalizer[rows, None]
            )
            weight = factor[rows, None]
            grad[rows] = part.mul_(weight).scatter_add_(1, ids[rows, None], -weight).to(grad.dtype)
        return grad.view(logits.shape), None, None


def _by_kernel(operation: str, logits: Tensor) -> bool:
    """Return True if our Triton kernel should compute the loss on a GPU."""
    beyond = None if logits.dim() and logits.size(-1) else "the logits are empty"
    return logits.is_cuda and takes_kernel(operation, logits, beyond=beyond)


def _rows_apart(flat: Tensor) -> Tensor:
    """Return logits ``[rows, v]`` as a tensor with contiguous rows that do not overlap in memory."""
    return flat if flat.stride(1) == 1 and not overlaps(flat) else flat.contiguous()


def _of_losses(grad: Tensor) -> Tensor:
    return grad.reshape(-1).contiguous()


def _precise_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _few_have_a_target(flat: Tensor, ignored: Tensor) -> bool:
    """Return True if so many targets are ignored that skipping their rows saves time.

    This happens only on a CPU, because counting the rows blocks the host.
    """
    return flat.device.type == "cpu" and int(ignored.sum()) > _WORTH_GATHERING * flat.size(0)


def _tiles_with_target(flat: Tensor, ignored: Tensor) -> Iterator[slice | Tensor]:
    """Yield tiles that cover the rows of logits ``[rows, v]``.

    If few rows have a target, yield only the indices of these rows.
    """
    if not _few_have_a_target(flat, ignored):
        yield from whole_row_slices(flat.size(0), flat.size(1), flat.device)
        return
    alive = (~ignored).nonzero().squeeze(1)
    for part in whole_row_slices(alive.numel(), flat.size(1), flat.device):
        yield alive[part]


_plain_cross_entropy.on("cpu", "npu", note="tiles of rows; on a CPU only the rows with a target")(
    _PlainCrossEntropy.apply
)
_plain_cross_entropy.on("cuda", note="one Triton kernel per direction⁶, else tiles of rows")(
    _PlainCrossEntropy.apply
)


def _local_ids(target: Tensor, vocab_start: int, part: int) -> tuple[Tensor, Tensor]:
    """Return token ids relative to this rank's part of the vocabulary, and a mask of the ids outside this
    part.
    """
    local = target - vocab_start
    elsewhere = (local < 0) | (local >= part)
    return local.masked_fill(elsewhere, 0), elsewhere


def _is_split(group: dist.ProcessGroup | None) -> bool:
    return group is not None and group.size() > 1


def reference(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    label_smoothing: float,
) -> Tensor:
    """Compute ``vocab_parallel_cross_entropy`` in plain torch with autograd, as the reference."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    local, elsewhere = _local_ids(target, vocab_start, z.size(-1))
    largest = z.detach().amax(-1)
    if _is_split(group):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    predicted = z.gather(-1, local[..., None]).squeeze(-1).masked_fill(elsewhere, 0.0)
    sums = torch.stack([(z - largest[..., None]).exp().sum(-1), predicted, z.sum(-1)])
    if _is_split(group):
        sums = _SumOverRanks.apply(sums, group)
    normalizer = largest + sums[0].log()
    smoothing = label_smoothing * vocab_size / (vocab_size - 1)
    return (1 - smoothing) * (normalizer - sums[1]) + smoothing * (normalizer - sums[2] / vocab_size)


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, with a backward pass that returns the gradient of the sum unchanged.

    Every rank computes the same loss from the sum.
    """

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = summand.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_cross_entropy = Operation("vocab_parallel_cross_entropy", reference, group="cross_entropy")


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Return the fp32 log-sum-exp ``[rows]`` of logits ``[rows, v]`` without allocating a second buffer
    of that size.
    """
    result = torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)
    for rows in whole_row_slices(logits.size(0), logits.size(1), logits.device):
        torch.logsumexp(logits[rows].float(), dim=-1, out=result[rows])
    return result


class CrossEntropy(torch.autograd.Function):
    """Implement ``vocab_parallel_cross_entropy`` for upstream versions in which the autograd function
    itself is patched.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        vocab_start: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        label_smoothing: float,
    ) -> Tensor:
        flat = logits.reshape(-1, logits.size(-1))
        smoothing = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
        ctx.smoothing, ctx.vocab_size, ctx.words = smoothing, vocab_size, None
        if _by_kernel("vocab_parallel_cross_entropy", logits):
            return CrossEntropy._forward_by_kernel(ctx, logits, target, vocab_start, group)
        local, elsewhere = _local_ids(target.reshape(-1), vocab_start, flat.size(-1))
        predicted = flat.gather(1, local[:, None]).squeeze(1).float().masked_fill_(elsewhere, 0.0)
        totals = [flat.sum(-1, dtype=torch.float32)] if label_smoothing else []
        normalizer, predicted, *totals = reduce_over_ranks(_log_sum_exp(flat), predicted, group, *totals)

        # The loss must not be a view: schedules divide it in place, which autograd forbids then.
        shaped = normalizer.view(target.shape)
        loss = shaped - predicted.view(target.shape)
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (shaped - totals[0].view(target.shape) / vocab_size)
        ctx.save_for_backward(logits, normalizer, local, elsewhere)
        return loss

    @staticmethod
    def _forward_by_kernel(
        ctx: Any, logits: Tensor, target: Tensor, vocab_start: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        flat, ids = _rows_apart(logits.reshape(-1, logits.size(-1))), target.reshape(-1).contiguous()
        ctx.words = kernels.Vocabulary(vocab_start, ctx.vocab_size, ctx.smoothing)
        if not _is_split(group):
            loss, normalizer = kernels.whole(flat, ids, ctx.words)
        else:
            normalizer, predicted, *totals = kernels.part(flat, ids, ctx.words)
            normalizer, predicted, *totals = reduce_over_ranks(normalizer, predicted, group, *totals)
            loss = normalizer - predicted
            for total in totals:
                loss = (1 - ctx.smoothing) * loss + ctx.smoothing * (normalizer - total / ctx.vocab_size)
        ctx.save_for_backward(logits, ids, normalizer)
        return loss.resize_(target.shape)  # not a view, see above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        if ctx.words is not None:
            return CrossEntropy._backward_by_kernel(ctx, grad_output), None, None, None, None, None
        logits, normalizer, local, elsewhere = ctx.saved_tensors
        # in place of the logits, where that is a matrix, and no value of it stands for several
        flat = logits.detach().reshape(-1, logits.size(-1))
        flat = flat.clone() if overlaps(flat) else flat
        factor = grad_output.reshape(-1, 1).float()
        hit = (factor * (1 - ctx.smoothing)).masked_fill_(elsewhere[:, None], 0.0)
        for rows in whole_row_slices(flat.size(0), flat.size(1), flat.device):
            part = flat[rows]
            # in place when part is fp32
            softmax = exponential_of_difference_(part.float(), normalizer[rows, None])
            if ctx.smoothing:
                softmax.sub_(ctx.smoothing / ctx.vocab_size)
            softmax.mul_(factor[rows]).scatter_add_(1, local[rows, None], -hit[rows])
            if softmax.data_ptr() != part.data_ptr():
                part.copy_(softmax)
        return flat.view(logits.shape), None, None, None, None, None

    @staticmethod
    def _backward_by_kernel(ctx: Any, grad_output: Tensor) -> Tensor:
        logits, ids, normalizer = ctx.saved_tensors
        flat = _rows_apart(logits.detach().reshape(-1, logits.size(-1)))
        kernels.gradient(_of_losses(grad_output), flat, ids, normalizer, ctx.words, flat)
        torch.autograd.graph.increment_version(logits)  # else a second pass would take gradients for logits
        return flat.view(logits.shape)


def reduce_over_ranks(
    normalizer: Tensor, predicted: Tensor, group: dist.ProcessGroup | None, *others: Tensor
) -> tuple[Tensor, ...]:
    """Combine the ranks' partial results over the vocabulary with two collectives on tensors ``[tokens]``.

    Args:
        normalizer: log-sum-exp of this rank's part.
        predicted: logit of the target, 0 if another rank has it.
        group: the tensor-parallel group. If it is None or a group of one, nothing is combined.
        others: additional values to sum.

    Returns:
        The same values for the whole vocabulary.
    """
    if not _is_split(group):
        return normalizer, predicted, *others
    largest = normalizer.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(normalizer - largest).exp_(), predicted, *others])
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), *sums[1:]


_cross_entropy.on("cpu", "npu", note="tiles of rows, gradient in place of the logits")(CrossEntropy.apply)
_cross_entropy.on(
    "cuda", note="one Triton kernel per direction⁶, else tiles of rows; gradient in place of the logits"
)(CrossEntropy.apply)


@_plain_cross_entropy.example()
def _plain_example(make: Make) -> Tensor:
    logits = make(32, 2, 500)
    target = torch.arange(64, device=logits.device).view(32, 2) * 7
    return cross_entropy(logits, target.masked_fill(target % 3 == 0, -100))


@_cross_entropy.example()
def _example(make: Make) -> Tensor:
    logits = make(32, 2, 500)
    target = torch.arange(64, device=logits.device).view(32, 2) * 7
    return vocab_parallel_cross_entropy(logits * 1, target, vocab_start=0, vocab_size=500)
