"""Describe a rank's part of the vocabulary, and where the gradient of its weight is stored."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Part(NamedTuple):
    """The arguments, other than tensors, of an implementation of ``linear_cross_entropy``.

    Attributes:
        start: ``vocab_start``.
        group: the tensor-parallel group, or None.
        main_grad: ``[v, h]``, or None.
    """

    start: int
    group: dist.ProcessGroup | None
    main_grad: Tensor | None
