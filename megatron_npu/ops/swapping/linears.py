"""Replace linear layers and dropout with our operations, which are faster than torch's on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_npu import devices
from megatron_npu.ops.dropout import dropout, dropout_in_a_graph
from megatron_npu.ops.products.linear import faster_than_torch, in_a_graph, linear, looks_for_dead_rows
from megatron_npu.ops.swapping.found import (
    Found,
    Replacement,
    agrees,
    bound_elsewhere,
    has_forward_of,
    is_leaf,
    names_in_forward,
    own_forward,
)


def recognise(module: nn.Module) -> Found:
    """Return the replacement for a linear layer or a dropout module on a CPU."""
    if devices.current().name != "cpu":
        return None  # torch's own, there
    if has_forward_of(module, nn.Dropout):
        return Replacement("dropout", "dropout", _dropout)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    is_linear = has_forward_of(module, nn.Linear)
    if not is_linear and not _is_conv1d(module, weight):
        return None
    wide = looks_for_dead_rows(weight.size(0 if is_linear else 1))
    if not wide and not any(map(faster_than_torch, (torch.float32, torch.bfloat16))):
        return None
    return Replacement("linear", "linear", forward if is_linear else _conv1d)


def _is_conv1d(module: Any, weight: Tensor) -> bool:
    """Return True if a test shows that a module is a linear layer with a transposed weight, as in GPT-2."""
    if not is_leaf(module) or "addmm" not in names_in_forward(module) or weight.device.type == "meta":
        return False
    bias = getattr(module, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != weight.shape[1:]:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, weight.size(0), generator=generator, dtype=torch.float32, device="cpu").to(weight)
    with torch.no_grad():
        return agrees(module(x), x @ weight + bias, 1e-5 if weight.dtype is torch.float32 else 3e-2)


def forward(module: Any, input: Tensor) -> Tensor:
    """Compute ``nn.Linear`` with our operation if the operation supports the call, otherwise with torch."""
    return _either(module, input, transposed=False)


def _conv1d(module: Any, x: Tensor) -> Tensor:
    return _either(module, x, transposed=True)


def _either(module: Any, input: Tensor, transposed: bool) -> Tensor:
    weight, bias = module.weight, module.bias
    autocast = torch.is_autocast_enabled(input.device.type)
    dtype = torch.get_autocast_dtype(input.device.type) if autocast else input.dtype
    if _is_torchs(input, dtype, autocast, rows=weight.size(1 if transposed else 0)):
        return own_forward(module, input)
    if autocast:
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if weight.dtype is not input.dtype:
        return own_forward(module, input)  # the error is torch's to raise
    return (in_a_graph if torch.compiler.is_compiling() else linear)(input, weight, bias, transposed)


def _is_torchs(input: Tensor, dtype: torch.dtype, autocast: bool, *, rows: int) -> bool:
    """Return True if torch should compute the layer, because of its device or because our operation is
    not faster.
    """
    in_graph = torch.compiler.is_compiling()
    if input.device.type != "cpu" if in_graph else bound_elsewhere(input):
        return True
    if faster_than_torch(dtype) or (not in_graph and looks_for_dead_rows(rows)):
        return False
    return in_graph or autocast  # autocast keeps its copy of the weight


def _dropout(module: Any, input: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and input.device.type == "cpu" and not module.inplace:
        return dropout_in_a_graph(input, module.p, module.training)
    if bound_elsewhere(input) or module.inplace:
        return own_forward(module, input)
    return dropout(input, module.p, module.training)
