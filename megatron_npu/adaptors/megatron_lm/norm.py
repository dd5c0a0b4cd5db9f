"""Patch ``megatron.model.fused_layer_norm`` to compute layer norm without a CUDA extension."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around, replace
from megatron_npu.adaptors.shared.layers.fused_kernels import initialise_without_kernel
from megatron_npu.ops import norm, residual_norm

_TARGET = "megatron.model.fused_layer_norm:MixedFusedLayerNorm"


around(
    f"{_TARGET}.__init__",
    why="upstream's constructor imports a CUDA extension, which our forward does not need",
)(initialise_without_kernel)


@replace(f"{_TARGET}.forward", why="upstream's kernel is a CUDA extension, which it compiles at start")
def forward(self: Any, input: Tensor) -> Tensor:
    """Apply layer norm to ``[..., h]``.

    The result has the weight's dtype, as with upstream's CUDA kernel.
    """
    from megatron.core.utils import make_viewless_tensor

    result = residual_norm.result_of(self, input)
    if result is not None:
        return result
    output = norm.mixed_norm(input, self.weight, self.bias, self.eps)
    # the output of a pipeline stage is freed by its .data, which must not be a view of something else
    return make_viewless_tensor(output, requires_grad=input.requires_grad, keep_graph=True)
