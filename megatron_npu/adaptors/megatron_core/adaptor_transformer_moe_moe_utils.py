"""``megatron.core.transformer.moe.moe_utils``: the router of a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import replace, transformer_engine_present

_TARGET = "megatron.core.transformer.moe.moe_utils:router_gating_linear"
_WHY = "upstream asks whether a name is None that only exists where TransformerEngine is installed: NameError"


@replace(_TARGET, versions=">=0.15", condition=transformer_engine_present, why=_WHY)
def router_gating_linear(
    inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype
) -> Tensor:
    """``[..., h]`` and ``[e, h]`` to ``[..., e]`` in ``router_dtype``; gradients in the inputs' dtypes."""
    bias = None if bias is None else bias.to(router_dtype)
    return F.linear(inp.to(router_dtype), weight.to(router_dtype), bias)


@replace(_TARGET, versions=">=0.13,<0.15", condition=transformer_engine_present, why=_WHY)
def router_gating_linear_without_bias(inp: Tensor, weight: Tensor, router_dtype: torch.dtype) -> Tensor:
    """As ``router_gating_linear``; the router has a bias from 0.15 on."""
    return F.linear(inp.to(router_dtype), weight.to(router_dtype))
