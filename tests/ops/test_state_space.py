"""The selective scan and the convolution before it, against the recurrence and a sum, as they are written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.state_space import causal_convolution, selective_scan
from tests.ops.against_fp64 import RELAXED, check


def recurrence(x, dt, decay, b, c):
    """``h_t = exp(dt_t decay) h_(t-1) + dt_t b_t x_tᵀ``, ``y_t = c_tᵀ h_t``, for each head by itself."""
    b, c = (part.repeat_interleave(x.size(2) // b.size(2), dim=2) for part in (b, c))
    state, outputs = 0.0, []
    for t in range(x.size(1)):
        new = torch.einsum("bh,bhn,bhp->bhnp", dt[:, t], b[:, t], x[:, t])
        state = torch.exp(dt[:, t] * decay)[..., None, None] * state + new
        outputs.append((c[:, t, :, :, None] * state).sum(2))
    return torch.stack(outputs, 1)


def factors(device, steps, heads=4, groups=2, width=3, size=5):
    """Values, steps before softplus, logarithms of the decays, b and c."""
    shapes = (steps, heads, width), (steps, heads), (steps, groups, size), (steps, groups, size)
    x, dt, b, c = (torch.randn(2, *shape, device=device) for shape in shapes)
    return x, dt, torch.randn(heads, device=device), b, c


def positive(operation):
    """Take ``dt`` before its softplus and the logarithm of the decay, as layers have them."""
    return lambda x, dt, log, b, c: operation(x, F.softplus(dt), -log.exp(), b, c)


@RELAXED
@given(steps=st.integers(1, 17), chunk=st.sampled_from([1, 4, 8, 32]), groups=st.sampled_from([1, 2, 4]))
def test_scan(device, dtype, steps, chunk, groups):
    """Sequences shorter than a chunk, longer ones, and such as are no multiple of it."""
    torch.manual_seed(steps)

    def scan(x, dt, decay, b, c):
        return selective_scan(x, dt, decay, b, c, chunk)

    loose = 1.0 if dtype is torch.float32 else 3.0  # softplus and exp are rounded to 16 bits here
    check(positive(scan), positive(recurrence), factors(device, steps, groups=groups), dtype, loose=loose)


def test_a_long_sequence_neither_overflows_nor_forgets(device):
    """Steps that leave all, and steps that leave nothing: their sums differ by more than fp32 can tell."""
    x, _, _, b, c = factors(device, 600)
    dt = torch.tensor([1e-4, 30.0], device=device).repeat(300).view(1, 600, 1).expand(2, 600, 4)
    decay = torch.tensor([-1e-3, -1.0, -4.0, -16.0], device=device)
    given_ = [t.detach().requires_grad_() for t in (x, dt.contiguous(), decay, b, c)]
    output = selective_scan(*given_, chunk=256)
    doubles = [t.detach().cpu().double().requires_grad_() for t in given_]
    expected = recurrence(*doubles)
    scale = expected.abs().max()
    assert (output.cpu() - expected).abs().max() < 1e-5 * scale
    for ours, right in zip(
        torch.autograd.grad(output.sum(), given_), torch.autograd.grad(expected.sum(), doubles), strict=True
    ):
        assert ours.isfinite().all()
        assert (ours.cpu() - right).abs().max() < 1e-4 * right.abs().max()


@RELAXED
@given(steps=st.integers(1, 9), width=st.sampled_from([1, 2, 4]), bias=st.booleans())
def test_convolution(device, dtype, steps, width, bias):
    def formula(input, weight, *rest):
        padded = F.pad(input.transpose(1, 2), (width - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], *rest, groups=6)).transpose(1, 2)

    tensors = [torch.randn(2, steps, 6, device=device), torch.randn(6, width, device=device)]
    check(causal_convolution, formula, tensors + [torch.randn(6, device=device)] * bias, dtype)


@pytest.mark.parametrize("wrong", range(4))
def test_shapes_that_do_not_fit(wrong):
    x, dt, decay, b, c = factors("cpu", 3)
    changed = [(x[0], dt, decay, b, c), (x, dt[:, 1:], decay, b, c), (x, dt, decay, b, c[:, 1:])]
    with pytest.raises(ValueError, match=r"must have the shapes|do not match|chunk must be"):
        selective_scan(*changed[wrong]) if wrong < 3 else selective_scan(x, dt, decay, b, c, chunk=0)
