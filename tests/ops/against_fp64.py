"""What every test of an operation does: compare output and all gradients with a formula in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_npu.base.settings import SIM
from tests.support.tolerances import assert_near

# A simulated NPU takes ten times as long for one, and its kernels have tests of their own (tests/sim).
EXAMPLES = 6 if SIM.enabled() else 15
RELAXED = settings(max_examples=EXAMPLES)


def rows_of(widths: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int, int]]:
    """Shapes ``[s, b, h]`` with few rows, 1 and odd numbers among them."""
    return st.tuples(st.integers(1, 6), st.integers(1, 3), widths)


def check(
    operation: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    loose: float = 1.0,
) -> None:
    """Compare an operation with its formula: output, dtype, strides, and the gradient of every tensor.

    Args:
        operation: from ``tensors`` in ``dtype`` to a tensor of that dtype, contiguous.
        formula: the same in plain torch; it is given fp64 tensors on the CPU (no NPU has fp64).
        tensors: the values, rounded to ``dtype`` for both.
        dtype: in which the operation works.
        loose: factor of the tolerance, for what loses precision by design.
    """
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
    actual, expected = operation(*leaves), formula(*doubles)
    assert actual.dtype is dtype
    assert actual.device == leaves[0].device
    assert actual.is_contiguous()
    assert_near(actual, expected, dtype, "output", loose)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    ours = torch.autograd.grad(actual, leaves, grad.to(actual.device))
    right = torch.autograd.grad(expected, doubles, grad.double())
    for i, (a, b) in enumerate(zip(ours, right, strict=True)):
        assert a.dtype is dtype
        # what is summed over rows was rounded row by row, and the sum may be smaller than its terms
        summed = 2.0 if b.numel() < expected.numel() else 1.0
        assert_near(a, b, dtype, f"gradient of tensor {i}", summed * loose)
    actual.mul_(1)  # which autograd forbids of a view that comes out of a function of ours


def assert_as_exact(
    actual: Tensor, leaves: Sequence[Tensor], exact: Tensor, doubles: Sequence[Tensor]
) -> None:
    """Compare an output in bf16 or fp32 with fp64's, value by value, and the gradients of a random one.

    Args:
        actual: of ``leaves``.
        leaves: bf16 or fp32, without gradients.
        exact: of ``doubles``.
        doubles: the same values in fp64.
    """
    finer = 2.0**-12 if actual.dtype is torch.float32 else 1.0
    torch.testing.assert_close(actual.double(), exact, rtol=finer * 2e-2, atol=finer * 2e-2)
    grad = torch.randn_like(exact).to(actual.dtype)
    actual.backward(grad)
    exact.backward(grad.double())
    for leaf, double in zip(leaves, doubles, strict=True):
        torch.testing.assert_close(leaf.grad.double(), double.grad, rtol=finer * 3e-2, atol=finer * 5e-2)
