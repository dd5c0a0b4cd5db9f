"""Derive the lengths of packed causal sequences from an attention mask ``[b, 1, s, s]``."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.caching import cache_on_tensor


def sequence_lengths(mask: Tensor) -> tuple[int, ...] | None:
    """Return the lengths of the packed sequences that a causal mask describes, batch row by batch row.

    Megatron builds its masks itself and passes s² booleans even for plain causal attention. A mask that only
    says "causal, within these sequences" is recognized here, so no kernel has to read it: with
    ``--reset-attention-mask`` each document is a sequence, and without the flag each row is a sequence.

    Args:
        mask: ``[b, 1, s, s]``, boolean, True where masked. Its values are read once, which waits for the
            device; the result is cached on the tensor until the tensor is written to.

    Returns:
        The lengths in tokens, starting with the first row of the batch; None if the mask hides anything else.
    """
    return cache_on_tensor(mask, "sequence_lengths", lambda: _read(mask))


def _read(mask: Tensor) -> tuple[int, ...] | None:
    if mask.dim() != 4 or mask.size(1) != 1 or mask.size(2) != mask.size(3) or not mask.numel():
        return None
    position = torch.arange(mask.size(-1), device=mask.device)
    lengths: list[int] = []
    for row in mask[:, 0]:  # [s, s]: one row of the batch at a time
        begins = (~row).to(torch.uint8).argmax(-1)  # the first key that each query sees
        # begins must begin sequences themselves: a sliding window's move with every query
        if not torch.equal(begins[begins], begins):
            return None
        expected = (position > position[:, None]) | (position < begins[:, None])
        if not torch.equal(row, expected):
            return None
        starts = _starts(begins, position)
        lengths += [end - start for start, end in zip(starts, [*starts[1:], row.size(0)], strict=True)]
    return tuple(lengths)


def _starts(begins: Tensor, position: Tensor) -> list[int]:
    """Return the positions at which sequences begin, given the position of each query's first visible
    key, ``[s]``.
    """
    return (begins == position).nonzero().flatten().tolist()
