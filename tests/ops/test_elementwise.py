"""Activations and scale-mask-softmax against their formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_npu.ops import activation, softmax
from tests.ops.tolerances import assert_near

RELAXED = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(2, 40))


def check(operation, formula, tensors, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    actual, expected = operation(*leaves), formula(*doubles)
    assert actual.dtype is dtype
    assert_near(actual, expected, dtype)
    grad = torch.randn(expected.shape, device=expected.device).to(dtype)
    ours = torch.autograd.grad(actual, leaves, grad)
    for a, b in zip(ours, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert_near(a, b, dtype, "gradient")


class BiasGelu(torch.autograd.Function):
    """The pair of functions as upstream's GeLUFunction uses them."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return activation.bias_gelu(x, bias)

    @staticmethod
    def backward(ctx, grad):
        result = activation.bias_gelu_backward(grad, *ctx.saved_tensors)
        return result, result.sum_to_size(ctx.saved_tensors[1].shape)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return activation.swiglu(x)

    @staticmethod
    def backward(ctx, grad):
        return activation.swiglu_backward(grad, *ctx.saved_tensors)


@RELAXED
@given(shape=shapes)
def test_bias_gelu_is_the_tanh_form(device, dtype, shape):
    torch.manual_seed(1)

    def formula(x, bias):
        x = x + bias
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    check(BiasGelu.apply, formula, [torch.randn(s, device=device) for s in (shape, shape[-1:])], dtype)


def test_bias_gelu_is_not_the_exact_form(device):
    x = torch.linspace(-4, 4, 101, device=device)
    difference = activation.bias_gelu(x, torch.zeros_like(x)) - torch.nn.functional.gelu(x)
    assert 1e-4 < difference.abs().max().item() < 1e-3


@RELAXED
@given(shape=shapes)
def test_swiglu(device, dtype, shape):
    torch.manual_seed(1)
    half = shape[-1]

    def formula(x):
        gate, value = x[..., :half], x[..., half:]
        return gate / (1 + (-gate).exp()) * value

    check(SwiGLU.apply, formula, [torch.randn(*shape[:-1], 2 * half, device=device)], dtype)


@RELAXED
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12)),
    kind=st.sampled_from(["none", "causal", "mask"]),
    scale=st.sampled_from([None, 0.5]),
)
def test_scale_mask_softmax(device, dtype, shape, kind, scale):
    torch.manual_seed(1)
    if kind == "causal":
        shape = (*shape[:2], shape[3], shape[3])
    mask = (torch.rand(shape[0], 1, *shape[2:], device=device) < 0.5) if kind == "mask" else None

    def formula(x):
        x = x * (scale or 1.0)
        hidden = torch.zeros(shape, dtype=torch.bool, device=device) if mask is None else mask.expand(shape)
        if kind == "causal":
            hidden = torch.ones(shape[2:], device=device).triu(1).bool().expand(shape)
        x = torch.where(hidden, torch.full_like(x, -10000.0), x)
        x = (x - x.max(-1, keepdim=True)[0]).exp()
        return x / x.sum(-1, keepdim=True)

    check(
        lambda x: softmax.scale_mask_softmax(x, mask, scale, kind == "causal"),
        formula,
        [torch.randn(shape, device=device)],
        dtype,
    )


def test_a_fully_masked_row_is_uniform(device):
    probabilities = softmax.scale_mask_softmax(
        torch.randn(1, 1, 2, 4, device=device),
        torch.ones(1, 1, 2, 4, dtype=torch.bool, device=device),
        None,
        False,
    )
    assert probabilities.cpu().flatten().tolist() == pytest.approx([0.25] * 8)
