"""``transformer_engine.pytorch.attention``.

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
    """The base class of upstream's wrapper; it cannot be instantiated itself.

    Raises:
        UsageError: it is instantiated.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "transformer_engine.pytorch.DotProductAttention by itself, without TransformerEngine",
            "Megatron's attention, which takes its place here",
            "Use megatron.core.extensions.transformer_engine.TEDotProductAttention.",
        )


class _SplitAlongDim:
    """The class with the one function that upstream uses: views of a tensor along a dimension."""

    @staticmethod
    def apply(
        tensor: Tensor, split_dim: int, split_size_or_sections: int | Sequence[int], squeeze: bool = False
    ) -> tuple[Tensor, ...]:
        """Return ``torch.split``; with ``squeeze``, remove the dimension from each part."""
        size = split_size_or_sections
        parts = torch.split(tensor, size if isinstance(size, int) else list(size), dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else tuple(parts)
