"""ops.linear_cross_entropy against the formula in fp64: each way, by blocks, and on a split vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.ops.linear_cross_entropy import blocks, kept, linear_cross_entropy
from tests.support.tolerances import assert_near


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a small vocabulary is several blocks, the last one of another width."""
    monkeypatch.setattr(blocks, "_NARROWEST", 64)
    monkeypatch.setattr(kept, "_FIRST", 64)
    monkeypatch.setattr(blocks, "_LOGITS", 1 << 9)
    monkeypatch.setattr(blocks, "_LOGITS_ON_CPU", 1 << 9)


def formula(hidden, weight, target, bias=0.0):
    logits = hidden @ weight.t() + bias
    return logits.logsumexp(-1) - logits.gather(-1, target[..., None])[..., 0]


def check(hidden, weight, target, dtype, loss, *bias):
    """Compare the loss of each token, and all gradients for gradients of any size."""
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight, *bias)]
    doubles = [each.detach().cpu().double().requires_grad_() for each in leaves]
    actual, expected = loss(*leaves), formula(*doubles[:2], target.cpu(), *doubles[2:])
    assert actual.dtype is torch.float32
    assert_near(actual, expected, dtype)
    factor = torch.rand(expected.shape)
    ours = torch.autograd.grad(actual, leaves, factor.to(actual))
    right = torch.autograd.grad(expected, doubles, factor.double())
    for name, a, b in zip(("hidden", "weight", "bias"), ours, right, strict=False):
        assert a.dtype is dtype
        assert_near(a, b, dtype, f"gradient of {name}")
    actual.div_(2)  # which autograd forbids of a view that comes out of a function of ours


def some(*shape, device):
    return torch.randn(shape).to(device)


@settings(max_examples=12)
@given(
    tokens=st.tuples(st.integers(1, 9), st.integers(1, 3)),
    width=st.integers(1, 40),
    vocabulary=st.integers(2, 200),
    recompute=st.booleans(),
    biased=st.booleans(),
)
def test_whole_vocabulary(device, dtype, tokens, width, vocabulary, recompute, biased):
    torch.manual_seed(2)
    hidden, weight = some(*tokens, width, device=device), some(vocabulary, width, device=device)
    target = torch.randint(vocabulary, tokens).to(device)
    bias = (some(vocabulary, device=device),) if biased else ()
    check(
        hidden,
        weight,
        target,
        dtype,
        lambda x, w, b=None: linear_cross_entropy(x, w, target, bias=b, recompute=recompute),
        *bias,
    )


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [0, 150])
def test_logits_far_apart_do_not_overflow(device, dtype, recompute, where):
    """One word is e³⁰⁰ times as probable as the others: in the first block, and in a later one."""
    torch.manual_seed(3)
    weight, hidden = some(200, 16, device=device) / 8, torch.ones(6, 16, device=device)
    weight[where] = 300 / 16
    target = torch.tensor([where, 1, 199, where, 70, 0], device=device)
    check(hidden, weight, target, dtype, lambda x, w: linear_cross_entropy(x, w, target, recompute=recompute))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_added_to_main_grad(device, dtype, recompute):
    hidden, weight = (some(n, 32, device=device).to(dtype).requires_grad_() for n in (6, 200))
    target = torch.arange(6, device=device) * 30
    (d_hidden, d_weight) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, target, recompute=recompute).sum(), (hidden, weight)
    )
    main_grad = torch.ones(200, 32, device=device)
    linear_cross_entropy(hidden, weight, target, main_grad=main_grad, recompute=recompute).sum().backward()
    assert weight.grad is None
    assert_near(main_grad - 1, d_weight.double().cpu(), dtype)
    torch.testing.assert_close(hidden.grad, d_hidden)


def test_frozen_weights_and_evaluation(device):
    hidden, weight = some(6, 32, device=device).requires_grad_(), some(200, 32, device=device)
    target = torch.arange(6, device=device) * 30
    loss = linear_cross_entropy(hidden, weight, target, recompute=False)
    assert torch.autograd.grad(loss.sum(), hidden)[0].any()
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, target), loss)


def check_split_vocabulary(rank, group):
    """Compare a rank of two with one process, logits alike and far apart; ``test_cross_entropy`` runs it."""
    torch.manual_seed(5)
    for recompute, larger in itertools.product((True, False), (1.0, 100.0)):
        hidden, weight, target = torch.randn(7, 2, 8), torch.randn(256, 8), torch.randint(256, (7, 2))
        weight[200] *= larger
        doubles = [each.double().requires_grad_() for each in (hidden, weight)]
        expected = formula(*doubles, target)
        expected.sum().backward()
        mine = slice(rank * 128, (rank + 1) * 128)
        x, part = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
        loss = linear_cross_entropy(x, part, target, vocab_start=mine.start, group=group, recompute=recompute)
        loss.sum().backward()
        dist.all_reduce(x.grad, group=group)
        assert_near(loss, expected, torch.float32)
        assert_near(x.grad, doubles[0].grad, torch.float32, "gradient of hidden")
        assert_near(part.grad, doubles[1].grad[mine], torch.float32, "gradient of weight")
