"""A sum and its norm in one operation, against their formulas in fp64, and who gets the gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops import residual_norm
from tests.ops.against_fp64 import RELAXED, check, rows_of
from tests.ops.test_norm import EPS, layer_formula, rms_formula, spread

widths = st.integers(2, 70)


def both(results):
    """One tensor that depends on the norm and on the sum."""
    output, total = results
    return output + total


@RELAXED
@given(shape=rows_of(widths), centered=st.booleans())
def test_layer_norm(device, dtype, shape, centered):
    torch.manual_seed(1)
    x = spread(shape, device)
    check(
        lambda x, r, w, b: both(residual_norm.add_layer_norm(x, r, w, b, EPS, centered)),
        lambda x, r, w, b: layer_formula(x + r, w, b, centered) + x + r,
        [x, x.flip(0), *torch.randn(2, shape[-1], device=device)],
        dtype,
        loose=3,  # the sum is rounded before it is normalised
    )


@RELAXED
@given(shape=rows_of(widths), centered=st.booleans())
def test_rms_norm(device, dtype, shape, centered):
    torch.manual_seed(1)
    x = torch.randn(shape, device=device)
    check(
        lambda x, r, w: both(residual_norm.add_rms_norm(x, r, w, EPS, centered)),
        lambda x, r, w: rms_formula(x + r, w, centered) + x + r,
        [x.sign() + x, x.sign(), torch.randn(shape[-1], device=device)],
        dtype,
        loose=3,
    )


@pytest.mark.parametrize("used", ["norm", "sum"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_one_of_the_two_results_alone(device, kind, used):
    torch.manual_seed(1)
    x, residual = (torch.randn(3, 2, 8, device=device, requires_grad=True) for _ in range(2))
    vectors = [torch.rand(8, device=device, requires_grad=True) for _ in range(2 if kind == "layer" else 1)]
    results = getattr(residual_norm, f"add_{kind}_norm")(x, residual, *vectors, EPS)
    results[0 if used == "norm" else 1].square().sum().backward()
    total = (x + residual).detach().cpu().double().requires_grad_()
    doubles = [v.detach().cpu().double() for v in vectors]
    norm = layer_formula(total, *doubles) if kind == "layer" else rms_formula(total, *doubles)
    (norm if used == "norm" else total).square().sum().backward()
    for grad in (x.grad, residual.grad):
        torch.testing.assert_close(grad.cpu().double(), total.grad, atol=1e-4, rtol=1e-4)


def test_kept_gradients_are_in_fp32_and_not_given_to_autograd(device):
    """Where the device has them in fp32; elsewhere nobody is asked."""
    kept = []
    x, residual = (torch.randn(3, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.rand(32, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    take = lambda parameter, grad: kept.append((parameter, grad)) or True  # noqa: E731
    output, _ = residual_norm.add_layer_norm(x, residual, weight, bias, EPS, keep=take)
    output.float().square().sum().backward()
    asked = bool(kept)  # of a GPU only where there is Triton
    assert asked or device != "npu"
    assert not asked or device != "cpu"
    if asked:
        assert [parameter is each for (parameter, _), each in zip(kept, (weight, bias), strict=True)] == [
            True
        ] * 2
        assert {grad.dtype for _, grad in kept} == {torch.float32}
    assert (weight.grad is None) == (bias.grad is None) == asked


def test_another_epsilon_is_beyond_the_npus_kernel():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    assert residual_norm.layer_norm_beyond_npu(x, weight, 1e-5) is None
    assert "npu_add_layer_norm supports only eps 1e-05, but got 1e-06" in residual_norm.layer_norm_beyond_npu(
        x, weight, 1e-6
    )
    assert "weight is" in residual_norm.rms_norm_beyond_npu(x, weight.half())
    assert "2 to 8 dimensions" in residual_norm.rms_norm_beyond_npu(x[0], weight)
