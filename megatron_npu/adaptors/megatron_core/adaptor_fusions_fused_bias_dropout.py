"""``megatron.core.fusions.fused_bias_dropout``: the one function behind its fused and unfused variants."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace
from megatron_npu.ops import dropout


@replace(
    "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func",
    devices=WITHOUT_CUDA,
    why="three passes and one draw per value; on cuda upstream compiles it",
)
def bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    """``[s, b, h]`` and the ``[h]`` bias, added to the ``[s, b, h]`` residual after dropout."""
    x, bias = x_with_bias
    return dropout.bias_dropout_add(x, bias, residual, prob, training)
