"""From a mask ``[b, 1, s, s]`` back to what it was made of: a causal triangle, cut at document boundaries."""

from __future__ import annotations

import torch
from torch import Tensor


def documents_of(mask: Tensor) -> tuple[int, ...] | None:
    """Return the lengths of the documents of a causal document mask, row of the batch by row.

    A host that builds its masks itself hands over s² booleans even for plain causal attention. A mask that
    says no more than "causal, within these documents" is recognised here, so that no kernel needs to read
    it: Megatron's ``reset_attention_mask``, and without resets one document per row.

    Args:
        mask: ``[b, 1, s, s]``, boolean, True where masked. Its values are read: on a device this waits for
            the device, so do it once per batch.

    Returns:
        The lengths, those of the first row of the batch first; None if the mask says anything else.
    """
    if mask.dim() != 4 or mask.size(1) != 1 or mask.size(2) != mask.size(3) or not mask.numel():
        return None
    rows = mask[:, 0]
    position = torch.arange(mask.size(-1), device=mask.device)
    begins = (~rows).to(torch.uint8).argmax(-1)  # [b, s]: the first key that a query sees
    expected = position > position[:, None]
    if not bool((begins <= position).all()):
        return None
    for row, begin in zip(rows, begins, strict=True):
        # begins must be boundaries themselves: a sliding window's begins move with every query
        if not torch.equal(begin[begin], begin) or not torch.equal(
            row, expected | (position < begin[:, None])
        ):
            return None
    lengths: list[int] = []
    for row in (begins == position).tolist():
        starts = [i for i, starts_here in enumerate(row) if starts_here]
        lengths += [end - start for start, end in zip(starts, [*starts[1:], len(row)], strict=True)]
    return tuple(lengths)
