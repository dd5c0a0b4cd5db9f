"""Tokens sorted by expert and back, against formulas in fp64, and the shapes that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.experts.token_permutation import permute_tokens, unpermute_tokens
from tests.ops.against_fp64 import RELAXED, check


def routing(tokens: int, experts: int, copies: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(copies, dim=1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


@RELAXED
@given(st.integers(1, 9), st.integers(1, 6), st.data())
def test_both_ways_and_their_gradients(device, dtype, tokens, experts, data):
    """Rows and probabilities by expert; sums of copies, with probabilities (0.12) and without."""
    copies = data.draw(st.integers(1, experts))
    chosen = routing(tokens, experts, copies, data.draw(st.integers(0, 99)))
    expert, token = chosen.T.nonzero(as_tuple=True)

    def ours(x, probs, rows):
        out, kept, positions = permute_tokens(x, chosen.to(device), probs, copies)
        back = unpermute_tokens(rows, positions, tokens)
        weighed = unpermute_tokens(rows, positions, tokens, probs, chosen.to(device))
        return torch.cat([out, kept[:, None] * out, back, weighed])

    def formula(x, probs, rows):
        out, kept = x[token], probs[token, expert]
        back, weighed = (
            torch.zeros(tokens, x.size(1), dtype=rows.dtype).index_add(0, token, part)
            for part in (rows, rows * kept[:, None])
        )
        return torch.cat([out, kept[:, None] * out, back, weighed])

    torch.manual_seed(0)
    shapes = ((tokens, 16), (tokens, experts), (tokens * copies, 16))
    check(ours, formula, tuple(torch.randn(shape, device=device) for shape in shapes), dtype)


def test_without_probabilities_there_are_none(device):
    rows, probs, _ = permute_tokens(torch.ones(3, 8, device=device), routing(3, 4, 2, 0).to(device), None, 2)
    assert rows.shape == (6, 8)
    assert probs is None


@pytest.mark.parametrize("copies", [0, 5])
def test_copies_that_do_not_fit(copies):
    with pytest.raises(ValueError, match="the number of copies must be from 1 to e"):
        permute_tokens(torch.ones(3, 8), routing(3, 4, 2, 0), None, copies)
