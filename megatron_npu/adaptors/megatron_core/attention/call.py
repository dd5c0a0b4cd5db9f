"""The arguments of one forward call of core attention, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_npu.adaptors.megatron_core.attention.layer_options import LayerOptions
from megatron_npu.adaptors.shared import core_attention
from megatron_npu.ops.attention import PackedSequences, attention


@dataclass(frozen=True)
class CoreAttentionCall:
    """What a call is told, and the two ways to hand tensors to ``ops.attention`` with it.

    Attributes:
        options: what the layer decided when it was built.
        scale: factor of the scores.
        dropout_p: probability; 0.0 in evaluation.
        causal: the type of mask says that no query sees a later key.
        sink: ``[n]``, a score more for each head of the query (``--softmax-type``); None without.
    """

    options: LayerOptions
    scale: float
    dropout_p: float
    causal: bool
    sink: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **visible: Any) -> Tensor:
        """``[sq, b, n, d]`` and ``[sk, b, g, d]`` to ``[sq, b, n * d]``.

        Args:
            visible: the arguments of ``ops.attention`` that say what a query sees, but for the window.
        """
        return core_attention.attend(query, key, value, **self._arguments(), **visible).flatten(2)

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """``[tq, n, d]`` and ``[tk, g, d]`` to ``[tq, n * d]``: sequences one behind the other (thd).

        The last query of a sequence stands at its last key.
        """
        visible: dict[str, Any] = {"causal": self.causal, "packed": packed, "offset": "end"}
        visible["window"] = self.options.window
        return attention(query, key, value, layout="TND", **self._arguments(), **visible).flatten(1)

    def _arguments(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "flags": self.options.flags,
            "dropout_p": self.dropout_p,
            "sink": self.sink,
        }

    def of_rank(self, group: dist.ProcessGroup) -> CoreAttentionCall:
        """Return the call for the heads that this rank of ``group`` gets in exchange for its tokens."""
        if self.sink is None:
            return self
        return replace(self, sink=self.sink.chunk(group.size())[group.rank()])
