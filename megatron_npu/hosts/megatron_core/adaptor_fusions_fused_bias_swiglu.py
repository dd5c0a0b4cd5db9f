"""``megatron.core.fusions.fused_bias_swiglu``: both are looked up at call time by its autograd functions."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.hosts.megatron_core.records import WITHOUT_CUDA, replace
from megatron_npu.ops import activation

_WHY = "a chain of element-wise passes; on cuda upstream compiles it"


@replace("megatron.core.fusions.fused_bias_swiglu:swiglu", devices=WITHOUT_CUDA, why=_WHY)
def swiglu(y: Tensor) -> Tensor:
    """``[s, b, 2h]`` to ``[s, b, h]``."""
    return activation.swiglu(y)


@replace("megatron.core.fusions.fused_bias_swiglu:swiglu_back", devices=WITHOUT_CUDA, why=_WHY)
def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Gradient of ``swiglu`` for ``y``."""
    return activation.swiglu_backward(g, y)
