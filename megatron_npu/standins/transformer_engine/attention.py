"""Stub for ``transformer_engine.pytorch.attention``.

Upstream's class that wraps ``DotProductAttention`` is replaced with one based on megatron-core's own
attention: ``adaptors.megatron_core.te_layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError


class DotProductAttention(torch.nn.Module):
    """Base class of upstream's attention wrapper, which cannot be instantiated itself.

    Raises:
        UsageError: it is instantiated.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "transformer_engine.pytorch.DotProductAttention cannot be used directly, because "
            "TransformerEngine is not installed; only Megatron's attention is replaced. Use "
            "megatron.core.extensions.transformer_engine.TEDotProductAttention."
        )


class _SplitAlongDim:
    """Stub class with one function, which splits a tensor into views along a dimension."""

    @staticmethod
    def apply(
        tensor: Tensor, split_dim: int, split_size_or_sections: int | Sequence[int], squeeze: bool = False
    ) -> tuple[Tensor, ...]:
        """Split a tensor with ``torch.split``, and return the parts.

        With ``squeeze``, the dimension is removed from each part.
        """
        size = split_size_or_sections
        parts = torch.split(tensor, size if isinstance(size, int) else list(size), dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else tuple(parts)
