"""Stub for ``fla.modules.convolution``, which computes a short causal convolution of each channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.ops.state_space import causal_convolution
from megatron_npu.standins.fla import lengths_of, refuse_states


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return ``silu(convolution + bias)`` of the input ``[b, s, d]``, and None in place of a state.

    Args:
        x: ``[b, s, d]``; with ``cu_seqlens``, b is 1.
        weight, bias: ``[d, w]`` and ``[d]``.
        initial_state, output_final_state: not supported.
        activation: ``silu`` or ``swish``, which are the same function.
        cu_seqlens: where packed sequences begin, ``[n + 1]``, of any integer dtype.

    Raises:
        UsageError: a state or another activation is requested.
    """
    refuse_states(initial_state, output_final_state)
    if activation not in ("silu", "swish"):
        raise UsageError(
            f"the activation of a causal convolution must be silu, but got {activation}. Pass silu."
        )
    parts = x.split(lengths_of(cu_seqlens, x.size(1)), dim=1)
    return torch.cat([causal_convolution(part, weight, bias) for part in parts], 1), None
