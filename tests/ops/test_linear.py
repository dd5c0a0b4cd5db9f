"""ops.linear against the product in fp64: both layouts of the weight, and rows that have no gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.ops.compiled import abi, library, products
from megatron_npu.ops.products import linear as room
from megatron_npu.ops.products.linear import linear
from tests.ops.against_fp64 import check
from tests.support.tolerances import assert_near


@pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward_and_gradients(device, dtype, transposed, with_bias):
    torch.manual_seed(1)
    weight = torch.randn(7, 5, device=device)
    tensors = [torch.randn(3, 2, 5, device=device), weight.t().contiguous() if transposed else weight]
    tensors += [torch.randn(7, device=device)] if with_bias else []

    def formula(x, w, b=0.0):
        return x @ (w if transposed else w.t()) + b

    check(lambda x, w, b=None: linear(x, w, b, transposed), formula, tensors, dtype)


@pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("alive", [0, 3, 12])
def test_rows_without_a_gradient_change_nothing(device, dtype, transposed, alive, monkeypatch):
    """Of a wide layer they are left out of the products, at any share of the rows."""
    monkeypatch.setattr(room, "_WIDE", 7)
    torch.manual_seed(2)
    x, w, b = (torch.randn(*shape, device=device).to(dtype) for shape in ((4, 3, 5), (7, 5), (7,)))
    w = w.t().contiguous() if transposed else w
    leaves = [t.requires_grad_() for t in (x, w, b)]
    doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
    grad = torch.zeros(12, 7)
    grad[torch.randperm(12)[:alive]] = torch.randn(alive, 7)
    grad = grad.view(4, 3, 7).to(dtype)
    ours = torch.autograd.grad(linear(*leaves, transposed), leaves, grad.to(device))
    expected = doubles[0] @ (doubles[1] if transposed else doubles[1].t()) + doubles[2]
    right = torch.autograd.grad(expected, doubles, grad.double())
    for actual, formula in zip(ours, right, strict=True):
        assert actual.dtype is dtype
        assert_near(actual, formula, dtype, loose=2.0)


@pytest.fixture(params=["WIDENED", "PAIRED", "oneDNN", "none"])
def path(request, monkeypatch):
    """Let products of a CPU take each of the paths that some processor takes."""
    ours = getattr(products.Arithmetic, request.param, None)
    if ours is products.Arithmetic.PAIRED and not (library() and abi.can_pair(library())):
        pytest.skip("the processor has no instruction for pairs of bf16")
    monkeypatch.setattr(products, "_arithmetic", lambda: ours)
    monkeypatch.setattr(room, "_ONEDNN_BEATS_MKL", request.param == "oneDNN")
    room._linear.bind("cpu")


WRONG = {
    "inner sizes": ((16, 64), (32, 48), (32,)),
    "a short bias": ((16, 48), (32, 48), (31,)),
    "a long bias": ((16, 48), (32, 48), (64,)),
    "no matrix": ((16, 48), (32, 48, 2), (32,)),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_values_of_a_bias_may_lie_apart(path, kind):
    """oneDNN would read them one behind the other, beyond the end of a bias of one value that is expanded."""
    torch.manual_seed(3)
    x, w, b = (torch.randn(shape).to(kind) for shape in ((4, 5), (3, 5), (6,)))
    for bias in (b[:1].expand(3), b[::2], b[1:4]):
        assert_near(linear(x, w, bias), x.double() @ w.double().t() + bias.double(), kind, loose=2.0)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_shapes_that_do_not_fit_raise_what_torch_does(path, wrong, kind):
    tensors = [torch.ones(shape, dtype=torch.float32).to(kind) for shape in WRONG[wrong]]
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        torch.nn.functional.linear(*tensors)
    with pytest.raises(type(theirs.value)) as ours:
        linear(*tensors)
    assert str(ours.value) == str(theirs.value)


def test_the_call_that_had_read_beyond(path):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.ones(16, 64).bfloat16(), torch.ones(32, 48).bfloat16())
    with pytest.raises(RuntimeError, match="same dtype"):
        linear(torch.ones(16, 48).bfloat16(), torch.ones(32, 48))
    total = torch.zeros(16, 16)
    with pytest.raises(RuntimeError):
        room.add_product(total, torch.ones(16, 64).bfloat16(), torch.ones(16, 48).bfloat16())
    with pytest.raises(RuntimeError):
        room.matmul(torch.ones(16, 64).bfloat16(), torch.ones(48, 32).bfloat16())
    assert not total.any()
