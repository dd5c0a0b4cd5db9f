"""Fuse residual additions with the norms that follow them, on NPUs and, with a Triton kernel, on GPUs.

Upstream adds in one function and normalizes in the next function, or in the next layer. Here, each place that
adds a residual is told which norm will read the sum. That norm finds its result attached to the sum. If the
norm's input comes from elsewhere (after a checkpoint's recomputation, or from another pipeline stage), the
norm computes the result itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_npu import devices
from megatron_npu.adaptors.shared import gradients
from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.ops import residual_norm
from megatron_npu.ops.activation_offload import saving

WHY = (
    "on an NPU one operation, and on cuda one kernel of ours, adds the residual and normalizes the sum; "
    "upstream needs two" + LAUNCHES_COUNTED
)


def vectors_of(norm: Any) -> tuple[Any, Any]:
    """Return the weight and bias of a norm, which may be inside a layer with one of TransformerEngine's
    names.
    """
    if hasattr(norm, "layer_norm_weight"):
        return norm.layer_norm_weight, norm.layer_norm_bias
    return getattr(norm, "weight", None), getattr(norm, "bias", None)


def reads_sums(norm: Any) -> bool:
    """Return True if a norm can be computed together with the residual sum that it reads."""
    weight, bias = vectors_of(norm)
    if not isinstance(weight, Tensor) or getattr(norm, "memory_efficient", False):
        return False
    shape = (1, weight.numel())  # every shape of an input is taken that a norm here is given
    if devices.current().name == "cuda":
        x = weight.new_empty(shape)
        return residual_norm.beyond_kernel(x, x, weight, None) is None
    if bias is None:
        return residual_norm.rms_norm_beyond_npu(weight.new_empty(shape), weight) is None
    return residual_norm.layer_norm_beyond_npu(weight.new_empty(shape), weight, norm.eps) is None


def is_shared_out(norm: Any) -> bool:
    """Return True if FSDP (torch's or Megatron's) gathers the weight of a norm only while the norm itself
    runs.

    The previous layer, which would add for this norm, would then read a shard, or memory to which a
    collective is still writing.
    """
    weight, _ = vectors_of(norm)
    return isinstance(weight, DTensor) or getattr(weight, "__fsdp_param__", False)


def add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, norm: Any) -> Tensor | None:
    """Return ``residual + dropout(x + bias)``, ``[s, b, h]``, with the result of ``norm`` attached to the
    tensor.

    Args:
        x: ``[s, b, h]``, in training.
        bias: ``[h]``, or None.
        residual: a tensor with the same shape as ``x``.
        p: the probability that a value is dropped.
        norm: a norm for which ``reads_sums`` returns True.

    Returns:
        None if the dtypes differ, as with --fp32-residual-connection.
    """
    weight, norm_bias = vectors_of(norm)
    if not x.dtype is residual.dtype is weight.dtype or x.shape != residual.shape:
        return None
    keep = None if x.is_cuda else gradients.keep  # there nobody adds vectors up at the end of backward
    options = (norm.eps, getattr(norm, "zero_centered_gamma", False), keep, bias, p)
    with saving(norm):
        if norm_bias is None:
            result, total = residual_norm.add_rms_norm(x, residual, weight, *options)
        else:
            result, total = residual_norm.add_layer_norm(x, residual, weight, norm_bias, *options)
    residual_norm.hand_on(total, norm, result)
    return total


def without_recomputation(granularity: str | None, modules: Any = ()) -> bool:
    """Return True if norms read residual sums directly.

    A layer that is recomputed as a whole reads a copy.
    """
    return granularity != "full" and "layernorm" not in (modules or ())


# The norms that will read the sums of the layer that runs; None where it has its own launch.
_READERS: ContextVar[Iterator[Any]] = ContextVar("tracks the norms that read the sums of the layer that runs")


@contextlib.contextmanager
def read_by(norms: Sequence[Any]) -> Iterator[None]:
    """Register the norms that read the residual sums computed inside the ``with`` block."""
    token = _READERS.set(iter(norms))
    try:
        yield
    finally:
        _READERS.reset(token)


def next_reader() -> Any:
    """Return the norm that reads the next residual sum of the running layer, or None."""
    return next(_READERS.get(iter(())), None)
