"""Fuse the bias of a parallel linear layer into its matmul on an NPU, which saves a kernel launch.

Upstream adds the bias of ``linear_qkv`` after the matmul, and passes the biases of the other layers to the
next fused function, which cannot fuse them with anything on an NPU. Row-parallel layers whose weight is split
over ranks keep their bias, which is added after the sum over the ranks.

Only the layers of a transformer block fuse their biases: the caller of a separate MLP or attention still
receives the bias, as upstream promises. The set of these layers is fixed when the block is built, so a
recomputation fuses the same biases.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.patching.registry import Recorder

_LAYERS = "megatron.core.tensor_parallel.layers"
_PRODUCT = "linear_with_grad_accumulation_and_async_allreduce"
_WHY = "on an NPU a matmul can add the bias in the same launch; upstream uses a second one" + LAUNCHES_COUNTED

_WHY_OWN = (
    "saves one launch and one pass over memory if a layer adds its bias itself, as in the QKV projection"
)

_IN_BLOCK = "megatron_npu_adds_bias"  # of a linear layer that a block's own sums call


class _Offer:
    """The bias of the layer that is running, which is offered to the layer's matmul."""

    def __init__(self, bias: Tensor) -> None:
        self._bias: Tensor | None = bias

    @property
    def taken(self) -> bool:
        """True if the matmul has added the bias."""
        return self._bias is None

    def take(self) -> Tensor | None:
        """Return the bias on the first call, and None on all later calls."""
        bias, self._bias = self._bias, None
        return bias


_OFFER: ContextVar[_Offer | None] = ContextVar("tracks the bias of the layer that runs", default=None)


def connect(recorder: Recorder, nothing: Callable[[Tensor], Tensor | None]) -> None:
    """Record the patches that fuse biases into matmuls in an upstream.

    Args:
        recorder: the upstream's recorder.
        nothing: a function that, given a bias that was already added, returns its replacement in the layer's
            result.
    """
    function = "LinearWithGradAccumulationAndAsyncCommunication"
    outermost = partial(recorder.around, devices=("npu",), why=_WHY, order=2)
    recorder.around(f"{_LAYERS}:{function}.forward", devices=("npu", "cuda"), why=_WHY_OWN, order=2)(
        add_in_product
    )
    outermost(f"{_LAYERS}:{_PRODUCT}")(with_waiting_bias)
    for kind in ("Column", "Row"):

        @outermost(f"{_LAYERS}:{kind}ParallelLinear.forward")
        def forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            """Compute the layer, mapping ``[s, b, i]`` to ``[s, b, o]``, and add the bias that upstream
            would leave to the caller.
            """
            if not _may_add(self):
                return original(self, *args, **kwargs)
            offer = _Offer(self.bias)
            token = _OFFER.set(offer)
            try:
                output, bias = original(self, *args, **kwargs)
            finally:
                _OFFER.reset(token)
            # weights that are not trained have a product of their own, which takes nothing
            return output, nothing(bias) if offer.taken else bias


def let_layers_add(layer: Module) -> None:
    """Make the parallel linear layers in a transformer layer add their own biases."""
    for module in layer.modules():
        if hasattr(module, "skip_bias_add"):
            setattr(module, _IN_BLOCK, True)


def _may_add(layer: Any) -> bool:
    """Return True if the layer's matmul computes the complete result, and the caller would only add the
    bias.
    """
    if not getattr(layer, _IN_BLOCK, False):
        return False
    if layer.bias is None or not layer.skip_bias_add or getattr(layer, "gather_output", False):
        return False
    split = getattr(layer, "input_size_per_partition", None)  # of rows only
    if split is None:
        return True
    # of an expert, the caller first scales the bias by the router's probability (since 0.15)
    return split == layer.input_size and not getattr(layer, "is_expert", False)


def with_waiting_bias(
    original: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Pass the bias that the layer offers to the function that computes the matmul."""
    offer = _OFFER.get()
    if bias is None and offer is not None:
        bias = offer.take()
    return original(input, weight, bias, *args, **kwargs)


def add_in_product(
    original: Callable[..., Tensor], ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any
) -> Tensor:
    """Run upstream's forward function without the bias, which the matmul adds instead.

    The bias is recorded for the backward pass.

    If another dtype is requested (the last argument since 0.20), upstream does not call torch's matmul, and
    nothing changes.
    """
    wider = bool(args) and isinstance(args[-1], torch.dtype) and args[-1] != input.dtype
    # autocast chooses the dtype of the product
    if bias is None or wider or torch.is_autocast_enabled(input.device.type):
        return original(ctx, input, weight, bias, *args)
    with _AddingBias(bias):
        output = original(ctx, input, weight, None, *args)
    ctx.use_bias = True
    return output


class _AddingBias(TorchFunctionMode):
    """Torch function mode in which ``torch.matmul`` of ``[..., i]`` and ``[i, o]`` also adds a bias
    ``[o]``.
    """

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = bias

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not torch.matmul:
            return function(*args, **(kwargs or {}))
        input, weight = args
        output = input.new_empty((*input.shape[:-1], weight.size(1)))
        rows = input.reshape(-1, input.size(-1))
        torch.addmm(self.bias, rows, weight, out=output.view(-1, weight.size(1)))  # no view is given out
        return output
