"""``transformer_engine.pytorch.GroupedLinear``: a linear layer for each expert, in one grouped product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.grouped_matmul import grouped_matmul
from megatron_npu.standins.transformer_engine.layers import (
    Initializer,
    TransformerEngineBaseModule,
    normal_weights,
)


class GroupedLinear(TransformerEngineBaseModule):
    """Parameters ``weight0`` ``[o, i]``, ``bias0`` ``[o]``, ``weight1``, …; no communication.

    Args:
        num_gemms: how many layers.
        in_features, out_features: of each, whole over all tensor-parallel ranks.
        bias: whether they have one.
        init_method: fills a weight.
        return_bias: return the biases, do not add them.
        parallel_mode: ``column`` or ``row``, as ``Linear``; None: neither.
        options: those of ``TransformerEngineBaseModule``.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Initializer | None = None,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_gemms, self.parallel_mode = num_gemms, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        fill = init_method or normal_weights
        for number in range(num_gemms):
            self.add_weights(str(number), self.out_features, self.in_features, parallel_mode, bias, fill)
        self.reset_parameters(defer_init=str(self.device) == "meta")

    def forward(
        self, inp: Tensor, m_splits: list[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Any:
        """``[t, i]``, the rows of each layer together, to ``[t, o]``; with ``return_bias`` also the biases.

        Args:
            m_splits: how many rows each has.
        """
        counts = torch.as_tensor(m_splits)
        weight = torch.stack(self._each("weight")).transpose(1, 2)
        output = grouped_matmul(inp.reshape(-1, self.in_features), weight, counts)
        if self.apply_bias:
            output = output + torch.stack(self._each("bias")).repeat_interleave(
                counts.to(output.device), dim=0, output_size=output.size(0)
            )
        output = output.view(*inp.shape[:-1], self.out_features)
        return (output, self._each("bias")) if self.return_bias else output

    def _each(self, kind: str) -> list[Tensor]:
        return [getattr(self, f"{kind}{number}") for number in range(self.num_gemms)]
