"""Compare an operation on the simulated NPU, forward and backward, with a formula in fp64 on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.tolerances import assert_near

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compare(
    operation: Callable[..., Any],
    formula: Callable[..., Any],
    inputs: Sequence[Any],
    dtype: torch.dtype,
    differentiable: bool = True,
) -> None:
    """Run both on the same numbers and compare the results and, by one random direction, the gradients.

    Args:
        operation: takes ``inputs`` with every tensor on the NPU, floating ones in ``dtype``.
        formula: takes the same values on the host, floating ones in fp64 as rounded to ``dtype``.
        inputs: floating tensors are differentiated; other tensors and values are passed through.
        differentiable: compare gradients too.
    """
    wide = [_leaf(x.to(dtype).double(), differentiable) if _floats(x) else x for x in inputs]
    on_npu = [_leaf(x.detach().to(dtype).npu(), differentiable) if _floats(x) else _to_npu(x) for x in wide]
    actual, expected = _all(operation(*on_npu)), _all(formula(*wide))
    assert len(actual) == len(expected)
    directions = [torch.randn_like(each).to(dtype).double() for each in expected]
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert got.device.type == "npu"
        assert_near(got.detach().cpu(), wanted.detach(), dtype, f"result {index}")
    if not differentiable:
        return
    sum((e * d).sum() for e, d in zip(expected, directions, strict=True)).backward()
    torch.autograd.backward(actual, [d.to(a.dtype).npu() for a, d in zip(actual, directions, strict=True)])
    for index, (got, wanted) in enumerate(zip(on_npu, wide, strict=True)):
        if _floats(wanted):
            assert got.grad is not None, f"input {index} has no gradient"
            assert_near(got.grad.cpu(), wanted.grad, dtype, f"gradient of input {index}")


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _leaf(x: Tensor, differentiable: bool) -> Tensor:
    return x.detach().requires_grad_(differentiable)


def _to_npu(x: Any) -> Any:
    return x.npu() if isinstance(x, Tensor) else x


def _all(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
