"""Describe a rank's part of the vocabulary and the destination of its weight gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Part(NamedTuple):
    """Non-tensor arguments of an implementation of ``linear_cross_entropy``.

    Attributes:
        start: ``vocab_start``.
        group: the tensor-parallel group, or None.
        main_grad: ``[v, h]``, or None.
    """

    start: int
    group: dist.ProcessGroup | None
    main_grad: Tensor | None
