"""ops.cross_entropy against the formula in fp64, on one rank and on a split vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.ops import dispatch, tiling
from megatron_npu.ops.cross_entropy import cross_entropy, vocab_parallel_cross_entropy
from tests.ops.test_linear_cross_entropy import check_split_vocabulary
from tests.support.tolerances import assert_near


def formula(logits, target, smoothing):
    """Loss per token in fp64: (1 - a') · nll + a' · mean over the vocabulary of -log p, a' = a·K/(K-1)."""
    size = logits.size(-1)
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    nll = -log_p.gather(-1, target[..., None])[..., 0]
    share = smoothing * size / (size - 1)
    return (1 - share) * nll - share * log_p.mean(-1)


def check(logits, target, dtype, loss, smoothing, scale=1.0):
    leaf = logits.to(dtype).requires_grad_()
    double = leaf.detach().double().requires_grad_()
    actual, expected = loss(leaf * 1), formula(double, target, smoothing)
    assert actual.dtype is torch.float32
    assert_near(actual, expected, torch.float32 if dtype is torch.float32 else dtype)
    factor = torch.rand(expected.shape, device=logits.device)
    (ours,) = torch.autograd.grad(actual, leaf, factor)
    (right,) = torch.autograd.grad(expected, double, factor.double())
    assert_near(ours, right, dtype, "gradient")


@settings(max_examples=30)
@given(
    tokens=st.tuples(st.integers(1, 7), st.integers(1, 3)),
    vocabulary=st.integers(2, 70),
    smoothing=st.sampled_from([0.0, 0.1]),
    chunk=st.sampled_from([1 << 20, 64]),
)
def test_whole_vocabulary(device, dtype, tokens, vocabulary, smoothing, chunk):
    torch.manual_seed(2)
    logits = torch.randn(*tokens, vocabulary, device=device) * 3
    target = torch.randint(vocabulary, tokens, device=device)
    whole, tiling._WHOLE_ROWS_BYTES = tiling._WHOLE_ROWS_BYTES, chunk  # also more chunks than one
    try:
        check(
            logits,
            target,
            dtype,
            lambda x: vocab_parallel_cross_entropy(
                x, target, vocab_start=0, vocab_size=vocabulary, label_smoothing=smoothing
            ),
            smoothing,
        )
    finally:
        tiling._WHOLE_ROWS_BYTES = whole


def test_large_logits_do_not_overflow(device):
    logits = torch.tensor([[500.0, -500.0, 499.0]], device=device, requires_grad=True)
    loss = vocab_parallel_cross_entropy(
        logits * 1, torch.tensor([0], device=device), vocab_start=0, vocab_size=3
    )
    assert loss.item() == pytest.approx(0.313262, abs=1e-5)


def test_backward_twice_is_refused(device):
    """The gradient has taken the place of the logits: a second pass must fail, not be wrong."""
    logits = torch.randn(4, 9, device=device, requires_grad=True) * 1
    loss = vocab_parallel_cross_entropy(
        logits, torch.zeros(4, dtype=torch.long, device=device), vocab_start=0, vocab_size=9
    ).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_can_be_divided_in_place(device, smoothing):
    """megatron-core's schedules do, after ``transpose().contiguous()``: a view where there is one sample."""
    logits = torch.randn(4, 1, 9, device=device, requires_grad=True)
    target = torch.zeros(4, 1, dtype=torch.long, device=device)

    def loss():
        return vocab_parallel_cross_entropy(
            logits * 1, target, vocab_start=0, vocab_size=9, label_smoothing=smoothing
        )

    (whole,) = torch.autograd.grad(loss().sum(), logits)
    divided = loss().transpose(0, 1).contiguous()
    divided /= 2
    (half,) = torch.autograd.grad(divided.sum(), logits)
    torch.testing.assert_close(half, whole / 2)


SPLIT = [
    (2, torch.float32),
    (3, torch.float32),
    (2, torch.bfloat16),
    (2, torch.float16),
]


def _rank(rank: int, world_size: int, store: str, dtype: torch.dtype) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(3)
    vocabulary, part = 12 * world_size, 12
    logits = torch.randn(5, 2, vocabulary).to(dtype)
    target = torch.randint(vocabulary, (5, 2))
    (operation,) = (each for each in dispatch.OPERATIONS if each.name == "vocab_parallel_cross_entropy")
    for smoothing in (0.0, 0.1):
        piece = logits[..., rank * part : (rank + 1) * part].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            piece * 1,
            target,
            vocab_start=rank * part,
            vocab_size=vocabulary,
            group=dist.group.WORLD,
            label_smoothing=smoothing,
        )
        assert loss.dtype is torch.float32
        double = logits.double().requires_grad_()
        expected = formula(double, target, smoothing)
        assert_near(loss, expected, torch.float32)  # sums are in fp32 whatever the dtype of the logits
        loss.sum().backward()
        (whole,) = torch.autograd.grad(expected.sum(), double)
        assert_near(piece.grad, whole[..., rank * part : (rank + 1) * part], dtype, "gradient")
        copy = piece.detach().requires_grad_()
        reference = operation.reference(copy, target, rank * part, vocabulary, dist.group.WORLD, smoothing)
        assert_near(reference, expected, torch.float32)
        reference.sum().backward()
        assert_near(copy.grad, whole[..., rank * part : (rank + 1) * part], dtype, "gradient")
    if world_size == 2 and dtype is torch.float32:
        check_split_vocabulary(rank, dist.group.WORLD)  # here, where two processes are at hand
    dist.destroy_process_group()


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(("world_size", "dtype"), SPLIT, ids=str)
def test_split_vocabulary(tmp_path, world_size, dtype):
    """The operation and its reference, which verify mode runs beside it."""
    mp.spawn(_rank, (world_size, str(tmp_path / "store"), dtype), nprocs=world_size)


@pytest.mark.parametrize("ignored", [0.0, 0.6, 1.0])
def test_ignored_tokens_have_no_loss_and_no_gradient(device, dtype, ignored, monkeypatch):
    """And the logits are as they were after backward: a caller may have them in hand."""
    monkeypatch.setattr(tiling, "_WHOLE_ROWS_BYTES", 600)
    torch.manual_seed(4)
    leaf = (torch.randn(6, 5, 70, device=device) * 3).to(dtype).requires_grad_()
    target = torch.randint(70, (6, 5), device=device)
    target[torch.rand(6, 5).to(device) < ignored] = -7
    double = leaf.detach().cpu().double().requires_grad_()
    logits = leaf * 1
    before = logits.detach().clone()
    actual = cross_entropy(logits, target, ignore_index=-7)
    expected = torch.nn.functional.cross_entropy(
        double.flatten(0, 1), target.cpu().flatten(), ignore_index=-7, reduction="none"
    ).view(6, 5)
    assert actual.dtype is torch.float32
    assert_near(actual, expected, torch.float32 if dtype is torch.float32 else dtype)
    factor = torch.rand(6, 5)
    (ours,) = torch.autograd.grad(actual, leaf, factor.to(device))
    (right,) = torch.autograd.grad(expected, double, factor.double())
    assert_near(ours, right, dtype, "gradient")
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
def test_logits_that_are_not_contiguous(device, dtype, kind):
    """Heads of a model may be columns of a padded one, or batch first."""
    torch.manual_seed(4)
    base = torch.randn(5, 3, 24, device=device) * 3
    target = torch.randint(20, (3, 5), device=device)
    views = {
        "transposed": lambda x: x.transpose(0, 1)[..., :20],
        "sliced": lambda x: x[:3, :1].expand(3, 5, 24)[..., 2:22],
        "expanded": lambda x: x[:1, :1, :20].expand(3, 5, 20),
    }
    leaf = base.to(dtype).requires_grad_()
    double = leaf.detach().double().requires_grad_()
    loss = vocab_parallel_cross_entropy(views[kind](leaf * 1), target, vocab_start=0, vocab_size=20)
    expected = formula(views[kind](double * 1), target, 0.0)
    assert_near(loss, expected, dtype)
    (ours,), (right,) = (torch.autograd.grad(a.sum(), b) for a, b in ((loss, leaf), (expected, double)))
    assert_near(ours, right, dtype, "gradient", loose=2)
