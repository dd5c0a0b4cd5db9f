"""Patch layer norm and RMS norm in the versions of ``megatron.model`` for devices other than CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import UNTIL, around, replace
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.ops import norm

_OF_CUDA = ("no_persist_layer_norm", "mem_efficient_ln", "apply_layernorm_1p")


@around(
    "megatron.model.layernorm:SPLayerNorm.__init__",
    devices=WITHOUT_CUDA,
    why=(
        "a decoder passes the arguments of the CUDA layer norm to this norm on every device, so T5 raises"
        " a TypeError"
    ),
    upstream_bug=True,
    until=UNTIL,
)
def initialise(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Remove the constructor arguments that select a CUDA kernel.

    --apply-layernorm-1p is rejected elsewhere.
    """
    original(self, *args, **{name: value for name, value in kwargs.items() if name not in _OF_CUDA})


@replace(
    "megatron.model.layernorm:SPLayerNorm.forward",
    devices=WITHOUT_CUDA,
    why="torch's version rejects a weight whose dtype differs from the input's, as with "
    "--fp32-residual-connection",
)
def forward(self: Any, x: Tensor) -> Tensor:
    """Apply layer norm to ``[..., h]``.

    The result has the weight's dtype.
    """
    return norm.mixed_norm(x, self.weight, self.bias, self.eps)


@replace(
    "megatron.model.rmsnorm:RMSNorm.forward",
    devices=WITHOUT_CUDA,
    why="upstream makes six passes over the input",
)
def forward_rms(self: Any, x: Tensor) -> Tensor:
    """Apply RMS norm to ``[..., h]``, with the mean square in fp32 (Zhang and Sennrich 2019)."""
    return norm.rms_norm(x, self.weight, self.eps)
