"""Compute the three matmuls of parallel linear layers with a faster CPU library if one is available.

Upstream's autograd function calls ``torch.matmul``, in the forward and the backward pass, between collectives
that are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_npu.ops.products import linear
from megatron_npu.patching.registry import Recorder

_FUNCTION = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"
_WHY = "on CPUs that multiply fp32 faster, torch's bf16 matmuls take twice as long as ours"
_MATMUL = (torch.matmul, Tensor.matmul)


def connect(recorder: Recorder) -> None:
    """Record the patches that make the linear layers of an upstream use faster matmuls."""
    for half in ("forward", "backward"):
        recorder.around(f"{_FUNCTION}.{half}", devices=("cpu",), why=_WHY, order=2)(multiplying)


def multiplying(original: Callable[..., Any], ctx: Any, input: Tensor, *args: Any) -> Any:
    """Run a layer's forward or backward function with faster matmuls.

    ``input`` is the input or the gradient of the output.
    """
    # what is faster is called by a name of its own, for which autocast chooses no dtype
    if torch.is_autocast_enabled("cpu") or not linear.faster_than_torch(input.dtype):
        return original(ctx, input, *args)
    with _FasterProducts():
        return original(ctx, input, *args)


class _FasterProducts(TorchFunctionMode):
    """Torch function mode in which ``torch.matmul`` calls ``ops.linear.matmul``."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _MATMUL and not kwargs:
            return linear.matmul(*args)
        return function(*args, **(kwargs or {}))
