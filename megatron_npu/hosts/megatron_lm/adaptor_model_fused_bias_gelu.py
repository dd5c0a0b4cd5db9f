"""``megatron.model.fused_bias_gelu``: both functions are looked up at call time by GeLUFunction."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.hosts.megatron_lm.records import replace
from megatron_npu.ops import activation

_WHY = "eight element-wise passes where torch has one kernel; nvfuser, which joined them, is gone"


@replace("megatron.model.fused_bias_gelu:bias_gelu", why=_WHY)
def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """``[s, b, h]`` and the ``[h]`` bias to ``[s, b, h]``."""
    return activation.bias_gelu(y, bias)


@replace("megatron.model.fused_bias_gelu:bias_gelu_back", why=_WHY)
def bias_gelu_back(g: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """Gradient of ``bias_gelu`` for ``y``."""
    return activation.bias_gelu_backward(g, y, bias)
