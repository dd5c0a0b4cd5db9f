"""``megatron.core.fusions.fused_bias_swiglu``: the function of the MLP, and the pieces that MoE uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace, wrap
from megatron_npu.ops import activation

_WHY = "a chain of element-wise passes; on cuda upstream compiles it"


@wrap("megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl", devices=WITHOUT_CUDA, why=_WHY)
def bias_swiglu_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take every call but those that store or move the input in a way of their own."""

    @functools.wraps(original)
    def implementation(input: Tensor, bias: Tensor | None, *options: Any, **named: Any) -> Tensor:
        if any(options) or any(named.values()):  # fp8_input_store, cpu_offload_input
            return original(input, bias, *options, **named)
        return activation.swiglu(input, bias)

    return implementation


@replace("megatron.core.fusions.fused_bias_swiglu:swiglu", devices=WITHOUT_CUDA, why=_WHY)
def swiglu(y: Tensor) -> Tensor:
    """``[t, 2h]`` to ``[t, h]``; called by the weighted variant of MoE."""
    return activation.swiglu(y)


@replace("megatron.core.fusions.fused_bias_swiglu:swiglu_back", devices=WITHOUT_CUDA, why=_WHY)
def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Gradient of ``swiglu`` for ``y``; called by the weighted variant of MoE."""
    return activation.swiglu_backward(g, y)
