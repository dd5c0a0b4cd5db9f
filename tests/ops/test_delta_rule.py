"""The gated delta rule in chunks, against the recurrence as it is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.delta_rule import gated_delta_rule
from tests.ops.against_fp64 import RELAXED, check

SCALE = 0.3


def recurrence(q, k, v, decay, beta):
    """``S = exp(decay) S``, ``S += beta k (v - Sᵀ k)ᵀ``, ``o = scale Sᵀ q``, for each head by itself."""
    state, outputs = torch.zeros(()), []
    for t in range(q.size(1)):
        state = decay[:, t].exp()[..., None, None] * state
        read = (k[:, t, :, :, None] * state).sum(2)
        new = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outputs.append(SCALE * (q[:, t, :, :, None] * state).sum(2))
    return torch.stack(outputs, 1)


def factors(device, steps, heads=3, size=4, width=5):
    """Queries and keys of any length, values, and what decays and betas are made of."""
    shapes = (steps, heads, size), (steps, heads, size), (steps, heads, width), (steps, heads), (steps, heads)
    return [torch.randn(2, *shape, device=device) for shape in shapes]


def as_layers_give_it(operation):
    """Keys of length one, decays below 1, betas from 0 to 1."""
    return lambda q, k, v, decay, beta: operation(
        F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, F.logsigmoid(decay), beta.sigmoid()
    )


@RELAXED
@given(steps=st.integers(1, 19), chunk=st.sampled_from([1, 4, 16, 64]))
def test_rule(device, dtype, steps, chunk):
    """Sequences shorter than a chunk, longer ones, and such as are no multiple of it."""
    torch.manual_seed(steps)

    def rule(*tensors):
        return gated_delta_rule(*tensors, SCALE, chunk)

    loose = 1.0 if dtype is torch.float32 else 4.0  # norms, decays and betas are rounded to 16 bits here
    check(as_layers_give_it(rule), as_layers_give_it(recurrence), factors(device, steps), dtype, loose=loose)


def test_equal_keys_that_are_never_forgotten(device):
    """The hardest triangular system: the powers of its matrix reach 10¹⁸, its inverse has 1 and -1."""
    q = F.normalize(torch.randn(1, 1, 1, 4, device=device), dim=-1).expand(1, 64, 1, 4)
    v = torch.randn(1, 64, 1, 4, device=device)
    none, all_ = torch.zeros(1, 64, 1, device=device), torch.ones(1, 64, 1, device=device)
    output = gated_delta_rule(q, q, v, none, all_, 1.0)
    torch.testing.assert_close(output, v, rtol=1e-5, atol=1e-5)  # what was written last is read


@pytest.mark.parametrize("wrong", range(4))
def test_shapes_that_do_not_fit(wrong):
    q, k, v, decay, beta = factors("cpu", 3)
    changed = [(q[0], k, v, decay, beta), (q, k[:, 1:], v, decay, beta), (q, k, v, decay, beta[:, 1:])]
    given_ = changed[wrong] if wrong < 3 else (q, k, v, decay, beta)
    with pytest.raises(ValueError, match=r"match|have the shape|chunk|are not"):
        gated_delta_rule(*given_, 1.0, 4 if wrong < 3 else 3)
