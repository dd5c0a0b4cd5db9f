"""GELU, SwiGLU and GEGLU, with and without bias, against their formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops import activation
from megatron_npu.ops.activation import cpu
from tests.ops.against_fp64 import RELAXED, check, rows_of

widths = st.integers(1, 40)


def gelu_tanh(z):
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def gelu_exact(z):
    return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))


def swiglu(z):
    gate, value = z.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * value


def geglu(z):
    gate, value = z.chunk(2, -1)
    return gelu_tanh(gate) * value


def exact_with_bias(input, bias=None):
    return activation.gelu(input if bias is None else input + bias)


CASES = {
    "gelu": (exact_with_bias, gelu_exact, 1),
    "bias_gelu": (activation.bias_gelu, gelu_tanh, 1),
    "swiglu": (activation.swiglu, swiglu, 2),
    "geglu": (activation.geglu, geglu, 2),
}
every_operation = pytest.mark.parametrize("name", CASES)


def against_the_formula(name, shape, device, dtype, with_bias):
    operation, formula, halves = CASES[name]
    torch.manual_seed(1)
    tensors = [2 * torch.randn(*shape[:-1], halves * shape[-1], device=device)]
    if with_bias:
        tensors.append(torch.randn(halves * shape[-1], device=device))
    roundings = 1.5 if halves == 2 else 1.0  # the product with the other half, too
    check(operation, lambda *t: formula(sum(t)), tensors, dtype, roundings)


@every_operation
@RELAXED
@given(shape=rows_of(widths), with_bias=st.booleans())
def test_forward_and_gradients(device, dtype, name, shape, with_bias):
    against_the_formula(name, shape, device, dtype, with_bias)


@pytest.mark.parametrize("with_bias", [False, True])
def test_without_gradients(device, dtype, with_bias):
    """No autograd function is made for texts that grow by a token: it is the formula all the same."""
    torch.manual_seed(1)
    x = (2 * torch.randn(3, 9, device=device)).to(dtype)
    bias = torch.randn(9, device=device).to(dtype) if with_bias else None
    with torch.no_grad():
        found = activation.bias_gelu(x, bias)
    exact = gelu_tanh(x.cpu().double() + (0 if bias is None else bias.cpu().double()))
    assert found.dtype == dtype
    tolerance = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found.cpu().double(), exact, **tolerance)


@every_operation
def test_far_out_and_empty(device, dtype, name):
    """Where the curve is flat, nothing overflows into nan; no rows give no rows."""
    operation, _, halves = CASES[name]
    x = torch.tensor([[-60.0, -20.0, 0.0, 20.0, 60.0] * 2], device=device).to(dtype).requires_grad_()
    bias = torch.zeros(10, device=device, dtype=dtype, requires_grad=True)
    output = operation(x, bias)
    output.sum().backward()
    assert all(torch.isfinite(t).all() for t in (output, x.grad, bias.grad))
    empty = torch.empty(0, 10, device=device, dtype=dtype, requires_grad=True)
    assert operation(empty, bias).shape == (0, 10 // halves)
    operation(empty, bias).sum().backward()
    assert empty.grad.shape == empty.shape


@every_operation
def test_only_one_of_the_two_needs_a_gradient(device, name):
    operation, formula, halves = CASES[name]
    for leaf in (0, 1):
        torch.manual_seed(1)
        tensors = [torch.randn(3, 4 * halves, device=device), torch.randn(4 * halves, device=device)]
        tensors[leaf].requires_grad_()
        double = [t.detach().cpu().double() for t in tensors]
        double[leaf].requires_grad_()
        operation(*tensors).sum().backward()
        formula(sum(double)).sum().backward()
        torch.testing.assert_close(tensors[leaf].grad.cpu(), double[leaf].grad.float(), rtol=1e-4, atol=1e-5)


@every_operation
def test_no_more_is_kept_than_the_inputs_take(device, dtype, name):
    operation, _, halves = CASES[name]
    x = torch.randn(64, 32 * halves, device=device).to(dtype).requires_grad_() * 1
    bias = torch.randn(32 * halves, device=device).to(dtype).requires_grad_()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.__setitem__(t.data_ptr(), t.nbytes), t)[1], lambda t: t
    ):
        operation(x, bias)
    assert sum(kept.values()) <= x.nbytes + bias.nbytes


def test_the_tanh_form_is_not_the_exact_one(device):
    """The original megatron_npu put the exact form in the place of the tanh form: other numbers, silently."""
    x = torch.linspace(-4, 4, 101, device=device)
    difference = activation.bias_gelu(x) - gelu_exact(x)
    assert 1e-4 < difference.abs().max().item() < 1e-3


def test_fast_gelu_of_torch_npu_is_neither():
    """Why npu_fast_gelu, x·sigmoid(1.702·x), is not used: 0.02 is a different model."""
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    fast = x * torch.sigmoid(1.702 * x)
    for right in (gelu_tanh(x), gelu_exact(x)):
        assert 0.015 < (fast - right).abs().max().item() < 0.025


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5)])
def test_gradient_for_functions_of_upstream(device, dtype, shape):
    """What upstream's autograd functions call, which keep the input themselves."""
    torch.manual_seed(1)
    x, grad = torch.randn(*shape[:-1], 2 * shape[-1]), torch.randn(*shape)
    x, grad = (t.to(device, dtype) for t in (x, grad))
    leaf = x.detach().cpu().double().requires_grad_()
    swiglu(leaf).backward(grad.cpu().double())
    ours = activation.swiglu_backward(grad, x)
    limit = 2e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(ours.cpu().double(), leaf.grad, rtol=limit, atol=limit)


@pytest.fixture
def small_tiles(monkeypatch):
    """A few rows are several tiles of GELU on the CPU, the last one smaller."""
    monkeypatch.setattr(cpu, "_TILE", 64)
    monkeypatch.setattr(cpu, "_FEWEST", 0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 20), (7, 64), (1, 200), (0, 8)])
def test_gelu_by_tiles(small_tiles, shape, with_bias):
    against_the_formula("bias_gelu", shape, torch.device("cpu"), torch.bfloat16, with_bias)


def test_gelu_by_tiles_far_out_and_kept(small_tiles):
    device = torch.device("cpu")
    test_far_out_and_empty(device, torch.bfloat16, "bias_gelu")
    test_no_more_is_kept_than_the_inputs_take(device, torch.bfloat16, "bias_gelu")


def test_gelu_computed_again_is_the_same():
    """Recomputed activations are first computed without gradients, then with."""
    z = torch.randn(40, 512).bfloat16().requires_grad_()
    assert z.numel() >= cpu._FEWEST
    with torch.no_grad():
        without = activation.bias_gelu(z)
    assert torch.equal(without, activation.bias_gelu(z))
