"""Reduce the overhead of linear layers if no gradients are needed, as in text generation.

Patches ``tensor_parallel.layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, records
from megatron_npu.adaptors.shared.layers import linear_products
from megatron_npu.ops.products import linear

linear_products.connect(records)


@around(
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    devices=("cpu",),
    why="if no gradient is needed, autograd's function and its autocast wrapper cost more than multiplying "
    "one token by a small matrix",
)
def without_gradients(
    original: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Multiply ``[s, b, i]`` by a weight ``[o, i]``, calling upstream's two operations without their
    wrapper.
    """
    shared = len(args) > 3 or kwargs.get("gtp_remat_size", 1) > 1  # since 0.19; before, a group had its place
    dtype = kwargs.get("output_dtype")  # since 0.20, of logits
    mixed = dtype not in (None, input.dtype)
    if torch.is_grad_enabled() or sequence_parallel or shared or mixed:
        return original(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            *args,
            **kwargs,
        )
    output = linear.matmul(input, weight.t())
    return output if bias is None else output + bias
