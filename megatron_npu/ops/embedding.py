"""Word embedding whose table is split over the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def vocab_parallel_embedding(ids: Tensor, weight: Tensor, vocab_start: int, vocab_end: int) -> Tensor:
    """Return this rank's summand of the embedding: zeros for tokens of other ranks' parts.

    Args:
        ids: ``[...]``, token ids of the whole vocabulary.
        weight: ``[vocab_end - vocab_start, h]``, this rank's rows of the table.
        vocab_start, vocab_end: the range of ids that this rank holds.

    Returns:
        ``[..., h]``, to be summed over the tensor-parallel group.

    No boolean indexing: its result has a size that only the device knows, so the host would wait.
    """
    elsewhere = (ids < vocab_start) | (ids >= vocab_end)
    local = (ids - vocab_start).masked_fill_(elsewhere, 0)
    return F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
