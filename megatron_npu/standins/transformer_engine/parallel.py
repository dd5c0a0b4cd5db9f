"""Compute the matmul of a linear layer together with the communication of its parallel mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor


def column(
    input: Tensor, weight: Tensor, bias: Tensor | None, *, group: Any, size: int, sequence: bool, fused: bool
) -> Tensor:
    """Compute a column-parallel matmul of ``[s, b, i]`` (``[s / tp, b, i]`` with ``sequence``) and a weight
    ``[o / tp, i]``.

    Args:
        bias: ``[o / tp]``, which is added, or None.
        group, size: the tensor-parallel ranks and their number.
        sequence: whether each rank has its part of the sequence.
        fused: whether to accumulate the weight's gradient into its ``main_grad``.

    Returns:
        ``[s, b, o / tp]``.
    """
    return _product(input, weight, bias, fused, size > 1 and not sequence, sequence, group)


def row(
    input: Tensor, weight: Tensor, bias: Tensor | None, *, group: Any, size: int, sequence: bool, fused: bool
) -> Tensor:
    """Compute a row-parallel matmul of ``[s, b, i / tp]`` and a weight ``[o, i / tp]``.

    Return ``[s, b, o]``.

    With ``sequence``, the result is ``[s / tp, b, o]``. The arguments are those of ``column``, but the bias
    ``[o]`` is added to the sum over the ranks.
    """
    from megatron.core.tensor_parallel import mappings

    if size == 1:
        return _product(input, weight, bias, fused, False, False, group)
    output = _product(input, weight, None, fused, False, False, group)
    name = "reduce_scatter_to_sequence_parallel" if sequence else "reduce_from_tensor_model_parallel"
    function = getattr(mappings, f"{name}_region")
    output = function(output, **_known(function, group=group))
    return output if bias is None else output + bias


def gathered(part: Tensor, group: Any) -> Tensor:
    """Gather the parts ``[s / tp, b, h]`` of all ranks into ``[s, b, h]``."""
    from megatron.core.tensor_parallel import mappings

    return mappings.gather_from_sequence_parallel_region(part, True, group=group)


def _product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fused: bool,
    allreduce: bool,
    sequence: bool,
    group: Any,
) -> Tensor:
    from megatron.core.tensor_parallel import layers

    if weight.requires_grad:
        function = layers.linear_with_grad_accumulation_and_async_allreduce
    else:
        function = layers.linear_with_frozen_weight
    return function(
        # ranks gather no strided tensor over HCCL: what multi-latent attention cuts from a product is one
        input=input.contiguous() if sequence else input,
        weight=weight,
        bias=bias,
        gradient_accumulation_fusion=fused,
        allreduce_dgrad=allreduce,
        sequence_parallel=sequence,
        **_known(function, tp_group=group),
    )


def _known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the given options that a function accepts.

    Functions of 0.12 support only one tensor-parallel group.
    """
    return {name: value for name, value in options.items() if name in _parameters(function)}


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
