"""Patch ``megatron.core.transformer.torch_norm``, which contains the norm that local layer specs use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_npu.adaptors.megatron_core.decorators import replace
from megatron_npu.ops import norm, residual_norm


@replace(
    "megatron.core.transformer.torch_norm:WrappedTorchNorm",
    why="upstream's version rejects sequence_parallel, layernorm_zero_centered_gamma, persist_layer_norm "
    "and memory_efficient_layer_norm, for which it expects apex or TransformerEngine",
)
class Norm(torch.nn.Module):
    """Layer norm or RMS norm, depending on ``config.normalization``.

    The parameters are those of ``torch.nn.LayerNorm``.

    Args:
        config: the TransformerConfig.
        hidden_size: the size of the last dimension.
        eps: added to the variance.
        persist_layer_norm, zero_centered_gamma, normalization: accepted for upstream's callers; as in
            upstream, the values in ``config`` are used.

    Raises:
        ValueError: the normalization is not supported.
    """

    returns_residual = False  # 0.20 asks; what is added before the norm stays with ``residual_norm``

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization must be LayerNorm or RMSNorm, but got {config.normalization}")
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.memory_efficient = config.memory_efficient_layer_norm
        self.weight = Parameter(torch.empty(hidden_size))
        if config.normalization == "LayerNorm":
            self.bias = Parameter(torch.empty(hidden_size))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        parameter: Any  # Megatron marks parameters with attributes
        for parameter in self.parameters():
            # finalize_model_grads all-reduces these over the tensor-parallel group
            parameter.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        """Initialize the scale to 1 and the bias to 0."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm to ``[..., h]``.

        For an fp32 residual, the result has the dtype of 16-bit weights.
        """
        result = residual_norm.result_of(self, x)
        if result is not None:
            return result
        options = (self.eps, self.zero_centered_gamma, self.memory_efficient)
        return norm.norm_of_residual(x, self.weight, self.bias, *options)
