"""Define the arguments, other than tensors, of a forward call of core attention."""

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
    """The arguments of a core attention call, and two methods that run ``ops.attention`` with them.

    Attributes:
        options: what was decided when the layer was built.
        scale: the factor of the scores.
        dropout_p: the dropout probability, which is 0.0 in evaluation.
        causal: whether the mask type says that no query sees a later key.
        sink: ``[n]``, an additional score for each query head (``--softmax-type``), or None.
    """

    options: LayerOptions
    scale: float
    dropout_p: float
    causal: bool
    sink: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **visible: Any) -> Tensor:
        """Compute attention: map queries ``[sq, b, n, d]`` and keys and values ``[sk, b, g, d]`` to ``[sq, b,
        n * d]``.

        Args:
            visible: the arguments of ``ops.attention``, except the window, that define which keys a query
                sees.
        """
        return core_attention.attend(query, key, value, **self._arguments(), **visible).flatten(2)

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Compute attention over packed sequences (thd): map ``[tq, n, d]`` and ``[tk, g, d]`` to ``[tq, n *
        d]``.

        The last query of a sequence is aligned with its last key.
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
        """Return the call for the heads that this rank computes after the all-to-all in ``group``."""
        if self.sink is None:
            return self
        return replace(self, sink=self.sink.chunk(group.size())[group.rank()])
