"""CUDA extensions that a module of Megatron imports when it is built, and nothing here uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_npu.ops import norm

_NORM = "fused_mix_prec_layer_norm_cuda"


def initialise_without_kernel(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Run ``MixedFusedLayerNorm.__init__`` while the name of its extension can be imported."""
    with _importable(_NORM):
        original(self, *args, **kwargs)


def mixed_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the norm ``[..., h]`` in the dtype of the weight, as apex's mixed-precision kernels.

    The two dtypes differ with ``--fp32-residual-connection``. Without a bias it is the RMS norm; the other
    arguments are those of :func:`megatron_npu.ops.norm.layer_norm`.
    """
    scale = weight.to(input.dtype)
    if bias is None:
        result = norm.rms_norm(input, scale, eps, zero_centered_gamma, memory_efficient)
    else:
        result = norm.layer_norm(
            input, scale, bias.to(input.dtype), eps, zero_centered_gamma, memory_efficient
        )
    return result.to(weight.dtype)


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
