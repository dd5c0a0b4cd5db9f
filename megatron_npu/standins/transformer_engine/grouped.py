"""Implement ``transformer_engine.pytorch.GroupedLinear``, which computes a linear layer per expert in one
matmul.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu.ops.experts.grouped_matmul import grouped_linear
from megatron_npu.standins.transformer_engine.layers import Initializer, Linear


class GroupedLinear(Linear):
    """A group of linear layers with parameters ``weight0`` ``[o, i]``, ``bias0`` ``[o]``, ``weight1``, …

    The group does not communicate.

    Args:
        num_gemms: the number of layers.
        in_features, out_features: the sizes of each layer, over all tensor-parallel ranks.
        options: the options of ``Linear``; with ``return_bias``, all biases are returned.
    """

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **options)

    def _add_weights(self, fill: Initializer) -> None:
        for number in range(self.num_gemms):
            self.add_weights(str(number), fill)

    def forward(  # type: ignore[override]  # as TransformerEngine's: a layer of several is told their rows
        self, inp: Tensor, m_splits: list[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """Multiply each group of adjacent rows of ``[t, in]`` by its own weight, and return ``[t, out]``.

        The biases may be returned too.

        Args:
            m_splits: the number of rows in each group.
        """
        rows, biases = inp.reshape(-1, self.in_features), self._each("bias")
        output = grouped_linear(
            rows, self._each("weight"), m_splits, biases if self.apply_bias else None
        ).view(*inp.shape[:-1], self.out_features)
        return (output, biases) if self.return_bias else output

    def _each(self, kind: str) -> list[Tensor]:
        return [getattr(self, f"{kind}{number}") for number in range(self.num_gemms)]
