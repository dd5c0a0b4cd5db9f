"""Implement the norms of ``transformer_engine.pytorch`` with our operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_npu.ops import norm, residual_norm


class RMSNorm(torch.nn.Module):
    """RMS norm with a parameter ``weight``, computed by our operation.

    Args:
        normalized_shape: the size of the last dimension.
        eps: added to the mean square.
        sequence_parallel: whether the weight's gradient is summed over the tensor-parallel ranks.
        zero_centered_gamma: whether the factor is the weight + 1.
        params_dtype: the dtype of the parameters. If None, torch's default.
        device: the device of the parameters.
        hidden_size: another name for ``normalized_shape``, used by megatron-core before 0.17.
        dtype: another name for ``params_dtype``, which TransformerEngine has had since 2.0.
    """

    has_bias = False
    weight: Parameter
    bias: Parameter

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size: Any = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            parameter: Any = Parameter(torch.empty(size, dtype=params_dtype or dtype, device=device))
            parameter.sequence_parallel = sequence_parallel
            self.register_parameter(name, parameter)
        self.reset_parameters()
        self._register_load_state_dict_pre_hook(_without_extra_state)

    def reset_parameters(self) -> None:
        """Initialize the scale to 1 and the bias to 0."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.has_bias:
            torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the norm to ``[..., h]``."""
        result = residual_norm.result_of(self, input)
        if result is not None:
            return result
        bias = self.bias if self.has_bias else None
        return norm.norm_of_residual(input, self.weight, bias, self.eps, self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    """Layer norm with the parameters ``weight`` and ``bias``.

    The arguments are those of ``RMSNorm``.
    """

    has_bias = True


def _without_extra_state(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove from a state dict the extra state that TransformerEngine's norms have had since version 2."""
    state_dict.pop(f"{prefix}_extra_state", None)
