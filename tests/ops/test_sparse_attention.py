"""Sparse attention over latents against a formula in fp64, and the shapes that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.sparse_attention import sparse_latent_attention
from tests.ops.against_fp64 import RELAXED, check


def chosen_keys(batch: int, length: int, count: int, seed: int) -> torch.Tensor:
    """Keys up to the query, drawn without repetition; -1 behind them where there are fewer."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, length, length, generator=generator)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -1.0)
    values, indices = scores.topk(min(count, length))
    return indices.masked_fill(values < 0, -1)


@RELAXED
@given(
    st.integers(1, 9), st.integers(1, 2), st.sampled_from([1, 2, 4]), st.integers(1, 9), st.integers(0, 99)
)
def test_against_masked_attention_and_its_gradients(device, dtype, length, batch, heads, count, seed):
    """The formula computes all scores and masks those of keys that are not chosen."""
    indices = chosen_keys(batch, length, count, seed)
    mask = torch.zeros(batch, length, length + 1, dtype=torch.bool)
    mask.scatter_(2, indices.masked_fill(indices < 0, length), True)
    hidden = ~mask[..., :length]

    def formula(query, key):
        scores = torch.einsum("sbnd,tbd->bnst", query, key[:, :, 0]) * 0.05
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return torch.einsum("bnst,tbd->sbnd", weights, key[:, :, 0, :512])

    def ours(query, key):
        return sparse_latent_attention(query, key, indices.to(device), 0.05, 512)

    torch.manual_seed(seed)
    shapes = (length, batch, heads, 576), (length, batch, 1, 576)
    check(ours, formula, tuple(torch.randn(shape, device=device) for shape in shapes), dtype)


def test_nothing_chosen_gives_zeros(device):
    query, key = torch.randn(2, 1, 2, 576, device=device), torch.randn(2, 1, 1, 576, device=device)
    indices = torch.tensor([[[-1], [0]]], device=device)
    output = sparse_latent_attention(query.bfloat16(), key.bfloat16(), indices, 1.0, 512)
    assert not output[0].any()
    torch.testing.assert_close(output[1, 0], key[0, 0, :, :512].bfloat16().expand(2, -1))


@pytest.mark.parametrize(
    ("key", "indices", "channels"),
    [
        ((3, 1, 2, 8), (1, 3, 2), 4),
        ((3, 1, 1, 8), (3, 1, 2), 4),
        ((3, 1, 1, 8), (1, 3), 4),
        ((3, 1, 1, 8), (1, 3, 2), 9),
    ],
)
def test_what_does_not_fit_is_refused(key, indices, channels):
    with pytest.raises(ValueError, match=r"must have the shapes|value channels do not fit"):
        sparse_latent_attention(
            torch.ones(3, 1, 2, 8), torch.ones(key), torch.zeros(indices, dtype=torch.int64), 1.0, channels
        )
