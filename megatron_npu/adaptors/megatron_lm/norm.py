"""``megatron.model.fused_layer_norm``: layer norm without a CUDA extension."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around, replace
from megatron_npu.ops import norm

_TARGET = "megatron.model.fused_layer_norm:MixedFusedLayerNorm"
_KERNEL = "fused_mix_prec_layer_norm_cuda"


@around(f"{_TARGET}.__init__", why="it imports a CUDA extension, which the forward below does without")
def initialise_without_kernel(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Run it while the name of the extension can be imported."""
    with _importable(_KERNEL):
        original(self, *args, **kwargs)


@contextlib.contextmanager
def _importable(name: str) -> Iterator[None]:
    absent = name not in sys.modules
    if absent:
        sys.modules[name] = ModuleType(name, "Empty: layer norm is an operation of megatron_npu.")
    try:
        yield
    finally:
        if absent:
            del sys.modules[name]


@replace(f"{_TARGET}.forward", why="upstream's kernel is a CUDA extension that it compiles at start")
def forward(self: Any, input: Tensor) -> Tensor:
    """``[..., h]`` to ``[..., h]`` in the dtype of the weight, as upstream's mixed-precision kernel.

    The two dtypes differ with ``--fp32-residual-connection``.
    """
    from megatron.core.utils import make_viewless_tensor

    weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
    output = norm.layer_norm(input, weight, bias, self.eps).to(self.weight.dtype)
    # the output of a pipeline stage is freed by its .data, which must not be a view of something else
    return make_viewless_tensor(output, requires_grad=input.requires_grad, keep_graph=True)
