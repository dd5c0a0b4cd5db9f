"""Run a model with half-precision weights in fp32, by converting one matrix at a time.

Storing the whole model in fp32 would require twice as much memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

_ROWS = 8192  # of the output layer at a time


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a tensor's values to ``dtype``, and return them in fp32."""
    return tensor.to(dtype).float()


def run(
    model: Module, dtype: torch.dtype, *, embeddings: Iterable[Module], output: Module, returns_bias: bool
) -> None:
    """Make a model compute in fp32, with weights that are rounded to ``dtype``.

    Args:
        model: the model, which must be in evaluation mode.
        dtype: the dtype of the converted weights.
        embeddings: the model's embedding modules, for which only the selected rows are converted to fp32.
        output: the model's output layer, which has no bias.
        returns_bias: whether the output layer also returns a bias, as megatron-core's linear layers do.
    """
    picking = {id(module) for module in embeddings}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if module is output:
            _replace_output(module, dtype, returns_bias)
        elif id(module) in picking:
            module.register_forward_hook(lambda _, given, out: rounded(out, dtype))
        else:
            _widen(module, own, dtype)


def _widen(module: Module, own: list[Parameter], dtype: torch.dtype) -> None:
    """Convert vectors to fp32 permanently, and matrices only while their module runs.

    The vectors stay in fp32 because they may be used after the call.
    """
    matrices = [parameter for parameter in own if parameter.dim() > 1]
    for parameter in own:
        if parameter.dim() <= 1:
            parameter.data = rounded(parameter.data, dtype)
    kept = [parameter.data for parameter in matrices]

    def begin(_: Module, given: Any) -> None:
        for parameter in matrices:
            parameter.data = rounded(parameter.data, dtype)

    def end(_: Module, given: Any, out: Any) -> None:
        for parameter, data in zip(matrices, kept, strict=True):
            parameter.data = data

    if matrices:
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)


def _replace_output(layer: Any, dtype: torch.dtype, returns_bias: bool) -> None:
    def forward(hidden: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
        result = logits(hidden, layer.weight if weight is None else weight, dtype)
        return (result, None) if returns_bias else result

    layer.forward = forward


def logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits ``[..., V]`` in fp32, given hidden states ``[..., h]`` and an output weight ``[V,
    h]``.
    """
    return torch.cat([F.linear(hidden, rounded(rows, dtype)) for rows in weight.split(_ROWS)], dim=-1)
