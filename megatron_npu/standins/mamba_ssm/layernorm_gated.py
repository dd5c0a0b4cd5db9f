"""Stub for ``mamba_ssm.ops.triton.layernorm_gated``, the gated norm that follows the scan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter


class RMSNorm(torch.nn.Module):
    """Gated RMS norm over groups of channels, with a parameter ``weight`` ``[h]``.

    Args:
        hidden_size: h.
        eps: added to the mean square.
        group_size: the number of channels that are normalized together. If None, all channels.
        norm_before_gate: whether the gate multiplies the norm's output or its input.
        device, dtype: the device and dtype of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Apply the norm to ``[..., h]`` in fp32, with the gate's logits ``[..., h]`` if they are given."""
        values = x.float()
        if z is not None and not self.norm_before_gate:
            values = values * F.silu(z.float())
        groups = values.unflatten(-1, (-1, self.group_size))
        scale = groups.square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        output = (groups * scale).flatten(-2) * self.weight.float()
        if z is not None and self.norm_before_gate:
            output = output * F.silu(z.float())
        return output.to(x.dtype)
