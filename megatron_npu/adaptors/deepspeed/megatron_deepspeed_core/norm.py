"""Layer norm and RMS norm: those of ``megatron.model`` for devices other than CUDA."""

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
    why="a decoder gives it what the layer norm for CUDA takes, on every device: T5 ends in a TypeError",
    upstream_bug=True,
    until=UNTIL,
)
def initialise(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Leave out which of CUDA's kernels is meant; --apply-layernorm-1p is refused (unsupported_options)."""
    original(self, *args, **{name: value for name, value in kwargs.items() if name not in _OF_CUDA})


@replace(
    "megatron.model.layernorm:SPLayerNorm.forward",
    devices=WITHOUT_CUDA,
    why="torch's refuses a weight of another dtype than the input, as with --fp32-residual-connection",
)
def forward(self: Any, x: Tensor) -> Tensor:
    """``[..., h]`` to ``[..., h]`` in the dtype of the weight."""
    return norm.mixed_norm(x, self.weight, self.bias, self.eps)


@replace("megatron.model.rmsnorm:RMSNorm.forward", devices=WITHOUT_CUDA, why="six passes over its input")
def forward_rms(self: Any, x: Tensor) -> Tensor:
    """``[..., h]`` to ``[..., h]``, the mean square in fp32 (Zhang and Sennrich 2019)."""
    return norm.rms_norm(x, self.weight, self.eps)
