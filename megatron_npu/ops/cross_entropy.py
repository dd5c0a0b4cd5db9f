"""Cross-entropy over a vocabulary that is split across the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows are worked on in pieces of about this many bytes, so that a piece stays in a core's L2 cache.
_CHUNK_BYTES = 1 << 20


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``logsumexp(logits) - logits[target]`` per token.

    Args:
        logits: ``[..., v]``, this rank's part of the vocabulary; fp32, bf16 or fp16. **Its memory is
            reused for the gradient in backward**, as upstream's does in forward, so that no second
            buffer of its size is needed: nothing may read it after backward.
        target: ``[...]``, token ids of the whole vocabulary.
        vocab_start: id of the first token of this rank's part.
        vocab_size: size of the whole vocabulary.
        group: the tensor-parallel group; None or a group of one means that ``logits`` is all of it.
        label_smoothing: probability mass given to the wrong tokens, in [0, 1), spread as upstream does
            (Szegedy et al. 2016 with K - 1 in place of K), over the *whole* vocabulary: megatron-core
            0.16 averages over each rank's part alone, so its loss depends on the parallel size.

    Returns:
        ``[...]``, fp32.

    Everything is computed in fp32, chunk by chunk; the extra memory is O(tokens).
    """
    return CrossEntropy.apply(logits, target, vocab_start, vocab_size, group, label_smoothing)


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    threads = torch.get_num_threads()
    step = max(1, _CHUNK_BYTES // (4 * columns) // threads) * threads  # every thread gets as many rows
    return (slice(first, first + step) for first in range(0, rows, step))


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Return fp32 ``[rows]`` from ``[rows, v]`` without a second buffer of its size."""
    result = torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)
    for rows in _chunks(*logits.shape):
        torch.logsumexp(logits[rows].float(), dim=-1, out=result[rows])
    return result


class CrossEntropy(torch.autograd.Function):
    """``vocab_parallel_cross_entropy`` for upstreams whose own autograd function is patched."""

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
        local = target.reshape(-1) - vocab_start
        elsewhere = (local < 0) | (local >= flat.size(-1))
        local = local.masked_fill(elsewhere, 0)
        predicted = flat.gather(1, local[:, None]).squeeze(1).float().masked_fill_(elsewhere, 0.0)
        total = flat.sum(-1, dtype=torch.float32) if label_smoothing else predicted.new_zeros(())
        normalizer, predicted, total = _reduce(_log_sum_exp(flat), predicted, total, group)

        # The loss must not be a view: schedules divide it in place, which autograd forbids then.
        shaped = normalizer.view(target.shape)
        loss = shaped - predicted.view(target.shape)
        smoothing = label_smoothing * vocab_size / (vocab_size - 1)
        if label_smoothing:
            loss = (1 - smoothing) * loss + smoothing * (shaped - total.view(target.shape) / vocab_size)
        ctx.save_for_backward(logits, normalizer, local, elsewhere)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, normalizer, local, elsewhere = ctx.saved_tensors
        grad = logits.detach()
        flat = grad.view(-1, grad.size(-1))
        factor = grad_output.reshape(-1, 1).float()
        hit = (factor * (1 - ctx.smoothing)).masked_fill_(elsewhere[:, None], 0.0)
        for rows in _chunks(*flat.shape):
            part = flat[rows]
            softmax = part.float().sub_(normalizer[rows, None]).exp_()  # in place when part is fp32
            if ctx.smoothing:
                softmax.sub_(ctx.smoothing / ctx.vocab_size)
            softmax.mul_(factor[rows]).scatter_add_(1, local[rows, None], -hit[rows])
            if softmax.data_ptr() != part.data_ptr():
                part.copy_(softmax)
        return grad, None, None, None, None, None


def _reduce(
    normalizer: Tensor, predicted: Tensor, total: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine what each rank knows of its part: two collectives over ``[tokens]``-sized tensors."""
    if group is None or group.size() == 1:
        return normalizer, predicted, total
    largest = normalizer.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(normalizer - largest).exp_(), predicted, total.expand_as(predicted)])
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1], sums[2]
