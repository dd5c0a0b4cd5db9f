"""Launch the cross-entropy kernels for the forward and the backward pass.

The operations define the autograd functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.triton.launching import launch, power_of_two

_BLOCK = 4096  # columns that a program has at a time
_NOBODY = -(1 << 62)  # no target is this one


class Vocabulary(NamedTuple):
    """This rank's range of the vocabulary, and the other arguments of cross-entropy besides logits and
    targets.

    Attributes:
        start: the id of the first column.
        size: the size of the whole vocabulary.
        share: the part of the loss that is distributed over all logits (label smoothing), as in upstream.
        ignored: the target value of rows to ignore; None means that no row is ignored.
    """

    start: int
    size: int
    share: float = 0.0
    ignored: int | None = None


class _Sums(NamedTuple):
    """The fp32 values that the forward kernel computes for each row.

    Fields that it does not write repeat another field.

    Attributes:
        normalizers: the logarithm of the sum of exponentials.
        predicted: the target's logit.
        totals: the sum of logits, for smoothing.
        losses: the losses, for a whole vocabulary.
    """

    normalizers: Tensor
    predicted: Tensor
    totals: Tensor
    losses: Tensor


def whole(logits: Tensor, targets: Tensor, words: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return fp32 losses and normalizers ``[rows]`` for logits ``[rows, v]`` over the whole vocabulary."""
    losses, normalizers = _of_rows(logits), _of_rows(logits)
    _forward(logits, targets, words, _Sums(normalizers, normalizers, normalizers, losses), is_whole=True)
    return losses, normalizers


def part(logits: Tensor, targets: Tensor, words: Vocabulary) -> tuple[Tensor, ...]:
    """Return the normalizers and the target logits for a rank's part of the vocabulary.

    With label smoothing, return the sums of logits too.
    """
    normalizers, predicted = _of_rows(logits), _of_rows(logits)
    totals = _of_rows(logits) if words.share else predicted
    _forward(logits, targets, words, _Sums(normalizers, predicted, totals, predicted), is_whole=False)
    return (normalizers, predicted, totals) if words.share else (normalizers, predicted)


def _of_rows(logits: Tensor) -> Tensor:
    return torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)


def _forward(logits: Tensor, targets: Tensor, words: Vocabulary, sums: _Sums, *, is_whole: bool) -> None:
    from megatron_npu.ops.triton.kernels import cross_entropy as kernels

    rows, width = logits.shape
    launch(
        *(kernels.forward, (rows,), sums.normalizers),
        *(logits, targets, *sums, logits.stride(0), width),
        *(words.start, _ignored(words), words.share, float(words.size)),
        *(is_whole, words.share != 0.0, words.ignored is not None, min(_BLOCK, max(16, power_of_two(width)))),
        num_warps=8,
    )


def gradient(
    grads: Tensor, logits: Tensor, targets: Tensor, normalizers: Tensor, words: Vocabulary, out: Tensor
) -> None:
    """Write the gradient of the logits ``[rows, v]`` to ``out``.

    ``out`` may be the logits tensor itself.

    Args:
        grads: the gradients of the losses, ``[rows]``, contiguous.
        normalizers: the normalizers of the whole vocabulary.
    """
    from megatron_npu.ops.triton.kernels import cross_entropy as kernels

    rows, width = logits.shape
    block = min(_BLOCK, max(16, power_of_two(width)))
    launch(
        *(kernels.backward, (rows, -(-width // block)), out),
        *(grads, logits, targets, normalizers, out, logits.stride(0), out.stride(0), width),
        *(words.start, _ignored(words), words.share, float(words.size)),
        *(words.share != 0.0, words.ignored is not None, block),
        num_warps=8,
    )


def _ignored(words: Vocabulary) -> int:
    return _NOBODY if words.ignored is None else words.ignored
