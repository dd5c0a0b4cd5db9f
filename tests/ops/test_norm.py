"""Layer norm and RMS norm against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops import norm, tiling
from tests.ops.against_fp64 import RELAXED, check, rows_of
from tests.support.tolerances import TOLERANCE, assert_near

EPS = 1e-5
widths = st.integers(2, 70)


def layer_formula(x, weight, bias, centered=False):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + EPS).sqrt() * (weight + centered) + bias


def rms_formula(x, weight, centered=False):
    return x / ((x**2).mean(-1, keepdim=True) + EPS).sqrt() * (weight + centered)


def spread(shape, device):
    """Values that differ within each row: where they do not, the gradient has no bound."""
    x = 0.3 * torch.randn(shape, device=device)
    return x + torch.arange(shape[-1], device=device) % 5 * 2 - 3


@RELAXED
@given(shape=rows_of(widths), centered=st.booleans(), shift=st.sampled_from([0.0, 3.0]))
def test_layer_norm(device, dtype, shape, centered, shift):
    torch.manual_seed(1)
    check(
        lambda x, w, b: norm.layer_norm(x, w, b, EPS, centered),
        lambda x, w, b: layer_formula(x, w, b, centered),
        [spread(shape, device) + shift, *torch.randn(2, shape[-1], device=device)],
        dtype,
        loose=3 if device == "npu" else 1,  # the simulator rounds the statistics to 16 bits
    )


@RELAXED
@given(shape=rows_of(widths), centered=st.booleans())
def test_rms_norm(device, dtype, shape, centered):
    torch.manual_seed(1)
    x = torch.randn(shape, device=device)
    check(
        lambda x, w: norm.rms_norm(x, w, EPS, centered),
        lambda x, w: rms_formula(x, w, centered),
        [x.sign() + x, torch.randn(shape[-1], device=device)],
        dtype,
    )


@pytest.mark.parametrize("centered", [False, True])
def test_memory_efficient_backward(device, dtype, centered):
    """The input is taken back from the output; with 16 bits of it, the gradient has its rounding too."""
    torch.manual_seed(1)
    x, weight, bias = spread((3, 2, 40), device), *torch.rand(2, 40, device=device)
    weight = weight + (0.0 if centered else 1.0)
    loose = 1 if dtype is torch.float32 else 3
    check(
        lambda x, w, b: norm.layer_norm(x, w, b, EPS, centered, memory_efficient=True),
        lambda x, w, b: layer_formula(x, w, b, centered),
        [x, weight, bias],
        dtype,
        loose,
    )
    check(
        lambda x, w: norm.rms_norm(x, w, EPS, centered, memory_efficient=True),
        lambda x, w: rms_formula(x, w, centered),
        [x, weight],
        dtype,
        loose,
    )


def test_memory_efficient_backward_keeps_the_output_only(device):
    x = torch.randn(64, 32, device=device, requires_grad=True) * 1
    weight, bias = (torch.ones(32, device=device, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        output = norm.layer_norm(x, weight, bias, EPS, memory_efficient=True)
    assert x.data_ptr() not in kept
    assert output.data_ptr() in kept


def test_memory_efficient_backward_survives_a_zero_factor(device):
    x = torch.randn(6, 8, device=device, requires_grad=True)
    weight = torch.zeros(8, device=device, requires_grad=True)
    norm.rms_norm(x, weight, EPS, memory_efficient=True).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_weight_gradients_of_many_rows(device, dtype, kind):
    """Sums over 4,096 rows: torch's CPU kernel adds them up in bf16 and is 10 % off."""
    if (device, kind) == ("npu", "layer"):
        pytest.skip("the case: the simulator has the CPU's kernel; what hardware does is not known")
    torch.manual_seed(1)
    x, grad = (torch.randn(4096, 32, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.rand(32, device=device).to(dtype).requires_grad_() for _ in range(2))
    if kind == "layer":
        leaves, output = [weight, bias], norm.layer_norm(x, weight, bias, EPS)
    else:
        leaves, output = [weight], norm.rms_norm(x, weight, EPS)
    doubles = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    formula = layer_formula if kind == "layer" else rms_formula
    right = torch.autograd.grad(formula(x.cpu().double(), *doubles), doubles, grad.cpu().double())
    for a, b in zip(torch.autograd.grad(output, leaves, grad), right, strict=True):
        error = (a.cpu().double() - b).abs().max() / b.abs().max()
        assert error < max(TOLERANCE[dtype] / 4, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_fp32_beside_a_16_bit_input(device, dtype):
    torch.manual_seed(1)
    x = torch.randn(5, 16, device=device).to(dtype).requires_grad_()
    weight, bias = (torch.rand(16, device=device, requires_grad=True) for _ in range(2))
    for output in (norm.layer_norm(x, weight, bias, EPS), norm.rms_norm(x, weight, EPS)):
        assert output.dtype is dtype
        output.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (dtype, torch.float32, torch.float32)


def test_tiles_of_any_size(device, dtype, monkeypatch):
    monkeypatch.setattr(tiling, "_TILE_BYTES", 200)
    torch.manual_seed(1)
    check(
        lambda x, w, b: norm.layer_norm(x, w, b, EPS),
        layer_formula,
        [spread((7, 3, 9), device), *torch.randn(2, 9, device=device)],
        dtype,
    )
    check(
        lambda x, w: norm.rms_norm(x, w, EPS),
        rms_formula,
        [spread((7, 3, 9), device), torch.randn(9, device=device)],
        dtype,
    )


def test_no_rows(device, dtype):
    weight = torch.ones(4, device=device, dtype=dtype, requires_grad=True)
    x = torch.empty(0, 4, device=device, dtype=dtype, requires_grad=True)
    for output in (norm.layer_norm(x, weight, weight, EPS), norm.rms_norm(x, weight, EPS)):
        assert output.shape == (0, 4)
        output.sum().backward()
    assert not weight.grad.any()


def test_inference_keeps_nothing(device):
    x, weight = torch.randn(4, 8, device=device), torch.ones(8, device=device, requires_grad=True)
    with torch.no_grad():
        assert not norm.layer_norm(x, weight, weight, EPS).requires_grad


def test_weights_in_fp64_beside_an_fp32_input(device):
    """No kernel reads doubles as if they were floats; a device without fp64 refuses the call by itself."""
    if device == "npu":
        pytest.skip("the case: an NPU has no fp64")
    torch.manual_seed(9)
    x, weight = spread((130, 40), device), torch.randn(40, dtype=torch.float64, device=device)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    doubles = [x.double().requires_grad_(), weight.clone().requires_grad_()]
    grads = torch.autograd.grad(norm.rms_norm(*leaves, EPS).sum(), leaves)
    expected = torch.autograd.grad(rms_formula(*doubles).sum(), doubles)
    for ours, exact in zip(grads, expected, strict=True):
        assert_near(ours, exact, torch.float32)
    assert grads[1].dtype is torch.float64
