"""Rotary embedding against complex multiplication in fp64."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops import dispatch, rotary, tiling
from tests.ops.against_fp64 import RELAXED, check


def formula(x, theta, interleaved, scale):
    """Each pair is a complex number, turned by its angle; theta is ``[s, r / 2]``."""
    size = 2 * theta.size(-1)
    turned, passed = x[..., :size], x[..., size:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    angle = theta[:, None, None, :].double()
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.full_like(angle, scale), angle)
    pairs = torch.view_as_real(product)
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    return torch.cat((pairs.flatten(-2), passed), -1)


def angles_of(theta, interleaved):
    doubled = theta.repeat_interleave(2, -1) if interleaved else torch.cat((theta, theta), -1)
    return doubled[:, None, None, :]


@RELAXED
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
    half=st.integers(1, 20),
    passed=st.integers(0, 3),
    interleaved=st.booleans(),
    scale=st.sampled_from([1.0, 0.7]),
)
def test_forward_and_gradient(device, dtype, shape, half, passed, interleaved, scale):
    torch.manual_seed(1)
    theta = torch.rand(shape[0], half) * 50
    angles = angles_of(theta, interleaved).to(device)
    check(
        lambda x: rotary.rotary(x, angles, interleaved, scale),
        lambda x: formula(x, theta, interleaved, scale),
        [torch.randn(*shape, 2 * half + passed, device=device)],
        dtype,
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_tiles_of_any_size(device, dtype, interleaved, monkeypatch):
    monkeypatch.setattr(tiling, "_TILE_BYTES", 200)
    theta = torch.rand(7, 3) * 50
    angles = angles_of(theta, interleaved).to(device)
    check(
        lambda x: rotary.rotary(x, angles, interleaved),
        lambda x: formula(x, theta, interleaved, 1.0),
        [torch.randn(7, 2, 3, 8, device=device)],
        dtype,
    )


def test_no_more_than_the_tables_is_kept(device):
    if device == "npu":
        pytest.skip("the case: torch_npu decides what its kernel keeps")
    x = torch.randn(8, 2, 3, 16, device=device, requires_grad=True) * 1
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        rotary.rotary(x, angles_of(torch.rand(8, 8), False).to(device))
    assert set(kept) == {(8, 1, 1, 16)}


def test_tables_are_computed_once_for_the_same_angles(device):
    x = torch.randn(4, 1, 1, 6, device=device)
    angles = angles_of(torch.rand(4, 3), False).to(device)
    first = rotary._tables(angles, 1.0)
    assert rotary._tables(angles, 1.0)[0] is first[0]
    assert rotary._tables(angles, 0.5)[0] is not first[0]
    before = rotary.rotary(x, angles)
    angles.mul_(2)  # changed in place: what is known of it is stale
    assert not torch.equal(rotary.rotary(x, angles), before)
    tables = weakref.ref(rotary._tables(angles, 1.0)[0])
    del angles
    gc.collect()
    assert tables() is None


@pytest.mark.parametrize("size", [3, 8])
def test_bad_angles(device, size):
    with pytest.raises(ValueError, match=f"even and at most 6, but got {size}"):
        rotary.rotary(torch.randn(2, 1, 1, 6, device=device), torch.zeros(2, 1, 1, size, device=device))


@pytest.mark.parametrize(
    ("shape", "tables", "interleaved", "reason"),
    [
        (
            (2, 1, 1, 896),
            (2, 1, 1, 896),
            False,
            "npu_rotary_mul supports only head sizes below 896, but got 896",
        ),
        (
            (2, 1000, 1, 4),
            (2, 1, 1, 4),
            False,
            "npu_rotary_mul supports fewer than 1000 sequences and heads, but got 1000 and 1",
        ),
        (
            (2, 40, 30, 4),
            (2, 1, 1, 4),
            True,
            "npu_rotary_mul supports fewer than 1000 sequences and heads, but got 40 and 30",
        ),
        (
            (2, 3, 1, 4),
            (1, 1, 1, 4),
            False,
            "npu_rotary_mul supports only tables of shape [s, 1, 1, d] or [b, s, 1, d], but got [1, 1, 1, 4]",
        ),
        (
            (2, 3, 1, 4),
            (2, 3, 1, 4),
            True,
            "npu_rotary_mul rotates interleaved pairs only if all sequences have the same tables",
        ),
        ((2, 3, 4), (2, 1, 4), False, "npu_rotary_mul supports only 4 dimensions, but got 3 and 3"),
        (
            (2, 3, 1, 4),
            (2, 1, 1, 4),
            False,
            "npu_rotary_mul supports only tensors on the NPU, but got tensors on the host",
        ),
    ],
)
def test_limits_of_the_npu_kernel(monkeypatch, shape, tables, interleaved, reason):
    """The decision needs no NPU: bound to one, a call that exceeds its limits runs on the reference."""
    monkeypatch.setattr(dispatch, "fallbacks", {})
    rotary._rotary.bind("npu")
    rotary.rotary(torch.randn(shape), torch.zeros(tables), interleaved)
    ((operation, given),) = dispatch.fallbacks
    assert operation == "rotary"
    assert given.endswith(reason)


@pytest.mark.parametrize(("interleaved", "batches"), [(False, 1), (False, 3), (True, 1)])
def test_tables_that_are_there_already_with_the_batch_first(device, dtype, interleaved, batches):
    torch.manual_seed(3)
    angles = torch.rand(batches, 5, 1, 3) * 6
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    check(
        lambda x: rotary.rotary_by_tables(x, *(t.to(device) for t in tables), interleaved),
        lambda x: rotary._reference(x, *(t.double() for t in tables), interleaved),
        [torch.randn(3, 5, 2, 8, device=device)],
        dtype,
    )
