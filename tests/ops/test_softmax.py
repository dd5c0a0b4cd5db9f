"""Scale, mask and softmax against the formula in fp64; fully masked rows; the limits of the NPU's kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops import dispatch, softmax
from tests.ops.against_fp64 import RELAXED, check


def formula(x, hidden, scale):
    x = torch.where(hidden, torch.full_like(x, -10000.0), x * (1.0 if scale is None else scale))
    x = (x - x.max(-1, keepdim=True)[0].detach()).exp()
    return x / x.sum(-1, keepdim=True)


def against_the_formula(device, dtype, shape, kind, scale):
    torch.manual_seed(1)
    causal = kind.startswith("causal")
    if causal:
        shape = (*shape[:2], shape[3], shape[3])
    mask = torch.rand(shape[0], 1, *shape[2:]) < 0.5 if kind.endswith("mask") else None
    hidden = torch.zeros(shape, dtype=torch.bool)
    if mask is not None:
        hidden = hidden | mask
    if causal:
        hidden = hidden | torch.ones(shape[2:], dtype=torch.bool).triu(1)
    on_device = None if mask is None else mask.to(device)
    check(
        lambda x: softmax.scale_mask_softmax(x, on_device, scale, causal),
        lambda x: formula(x, hidden, scale),
        [torch.randn(shape, device=device)],
        dtype,
    )


kinds = st.sampled_from(["none", "causal", "mask", "causal and mask"])
scales = st.sampled_from([None, 0.5])


@RELAXED
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12)),
    kind=kinds,
    scale=scales,
)
def test_any_shape(device, dtype, shape, kind, scale):
    against_the_formula(device, dtype, shape, kind, scale)


@RELAXED
@given(queries=st.sampled_from([32, 96]), keys=st.sampled_from([32, 64]), kind=kinds, scale=scales)
def test_shapes_that_the_npu_takes(device, dtype, queries, keys, kind, scale, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")  # whatever leaves its fused path is an error
    against_the_formula(device, dtype, (2, 3, queries, keys), kind, scale)


@pytest.mark.parametrize("size", [4, 32])
def test_a_fully_masked_row_is_uniform_and_passes_no_gradient(device, size):
    scores = torch.randn(1, 1, size, size, device=device, requires_grad=True)
    mask = torch.zeros(1, 1, size, size, dtype=torch.bool, device=device)
    mask[..., 1, :] = True
    probabilities = softmax.scale_mask_softmax(scores, mask, None, False)
    assert probabilities[0, 0, 1].tolist() == pytest.approx([1 / size] * size)
    (probabilities * torch.arange(size, device=device)).sum().backward()
    if device == "npu" and size == 32:
        return  # what the kernel's gradient is in such a row is not documented
    assert not scores.grad[0, 0, 1].any()
    assert scores.grad[0, 0, 2].any()


def test_memory_is_one_copy_of_the_probabilities(device, dtype):
    if device == "npu":
        pytest.skip("the case: torch_npu decides what its kernel keeps")
    scores = torch.randn(2, 2, 32, 32, device=device).to(dtype).requires_grad_() * 1
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.__setitem__(t.data_ptr(), t.nbytes), t)[1], lambda t: t
    ):
        softmax.scale_mask_softmax(scores, None, 0.5, False)
    assert sum(kept.values()) == scores.nbytes


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (
            (1, 1, 31, 64),
            "npu_scaled_masked_softmax supports only 32 to 4096 queries in multiples of 32, but got 31",
        ),
        (
            (1, 1, 64, 48),
            "npu_scaled_masked_softmax supports only 32 to 4096 keys in multiples of 32, but got 48",
        ),
        (
            (1, 1, 64, 4128),
            "npu_scaled_masked_softmax supports only 32 to 4096 keys in multiples of 32, but got 4128",
        ),
        ((1, 64, 64), "4 dimensions, but got 3"),
    ],
)
def test_limits_of_the_npu_kernel(shape, reason, monkeypatch):
    """The decision needs no NPU: bound to one, a call that exceeds its limits runs on the reference."""
    monkeypatch.setattr(dispatch, "fallbacks", {})
    softmax._scale_mask_softmax.bind("npu")
    scores = torch.randn(shape)
    probabilities = softmax.scale_mask_softmax(scores, None, None, False)
    torch.testing.assert_close(probabilities, scores.softmax(-1))
    ((operation, given),) = dispatch.fallbacks
    assert operation == "scale_mask_softmax"
    assert given.endswith(reason)
