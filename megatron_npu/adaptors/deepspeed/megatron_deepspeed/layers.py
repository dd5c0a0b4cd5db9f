"""Replace the CUDA extension for layer norm, and give all ranks the same bias in row-parallel layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import around, replace
from megatron_npu.adaptors.shared.layers.fused_kernels import initialise_without_kernel
from megatron_npu.ops import norm

_NORM = "megatron.model.fused_layer_norm:MixedFusedLayerNorm"
_WHY = "upstream's kernel is a CUDA extension, which it compiles at start"

around(
    f"{_NORM}.__init__",
    why="upstream's constructor imports a CUDA extension, which our forward does not need",
)(initialise_without_kernel)


@replace(f"{_NORM}.forward", why=_WHY)
def forward(self: Any, input: Tensor) -> Tensor:
    """Apply layer norm to ``[..., h]``.

    The result has the weight's dtype, as with upstream's CUDA kernel.
    """
    if self.layernorm_tp_auto_sync:
        _average_over_tensor_parallel_ranks(self.weight, self.bias)
    return norm.mixed_norm(input, self.weight, self.bias, self.eps)


@around(
    "megatron.mpu.layers:RowParallelLinear.forward",
    why=(
        "with --sync-tp-duplicated-parameters the layer averages its bias in place, which current torch "
        "rejects for a leaf that requires grad, and with ReduceOp.AVG, which gloo lacks"
    ),
)
def forward_with_one_bias(original: Callable[..., Any], self: Any, input_: Tensor) -> Any:
    """Average the layer's bias over the ranks, and then call the layer.

    Upstream averages it after the matmul.
    """
    if not self.bias_tp_auto_sync:
        return original(self, input_)
    if self.bias is not None:
        _average_over_tensor_parallel_ranks(self.bias)
    self.bias_tp_auto_sync = False
    try:
        return original(self, input_)
    finally:
        self.bias_tp_auto_sync = True


@torch.no_grad()
def _average_over_tensor_parallel_ranks(*parameters: Tensor) -> None:
    """Average parameters over the tensor-parallel ranks without ``ReduceOp.AVG``, which gloo does not
    support.
    """
    from megatron import mpu

    group, size = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    for parameter in parameters if size > 1 else ():
        torch.distributed.all_reduce(parameter, group=group)
        parameter.div_(size)
