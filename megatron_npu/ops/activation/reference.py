"""Define reference implementations of the activation functions in plain torch, computed in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_npu.ops.dispatch import Operation

# The tanh form of GELU is z/2 · (1 + tanh(K · (z + C·z³))).
K, C = math.sqrt(2 / math.pi), 0.044715


def _with_bias(input: Tensor, bias: Tensor | None) -> Tensor:
    z = input.to(torch.promote_types(input.dtype, torch.float32))
    return z if bias is None else z + bias


def _gelu_tanh(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(K * (z + C * z**3)))


def _gelu(input: Tensor) -> Tensor:
    z = input.to(torch.promote_types(input.dtype, torch.float32))
    return (0.5 * z * (1 + torch.erf(z / math.sqrt(2)))).to(input.dtype)


def _bias_gelu(input: Tensor, bias: Tensor | None) -> Tensor:
    return _gelu_tanh(_with_bias(input, bias)).to(input.dtype)


def _swiglu(input: Tensor, bias: Tensor | None) -> Tensor:
    gate, value = _with_bias(input, bias).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * value).to(input.dtype)


def _geglu(input: Tensor, bias: Tensor | None) -> Tensor:
    gate, value = _with_bias(input, bias).chunk(2, -1)
    return (_gelu_tanh(gate) * value).to(input.dtype)


gelu = Operation("gelu", _gelu, group="activation")
bias_gelu = Operation("bias_gelu", _bias_gelu, group="activation")
swiglu = Operation("swiglu", _swiglu, group="activation")
geglu = Operation("geglu", _geglu, group="activation")
