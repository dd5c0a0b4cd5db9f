"""Attention over blocks of the keys: disjoint blocks make the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.attention.block import Residuals, attention_block, attention_block_backward
from megatron_npu.ops.attention.context_parallel import ring
from tests.ops.against_fp64 import RELAXED
from tests.ops.tolerances import assert_near

SCALE = 0.3
SHAPES = st.fixed_dictionaries(
    {
        "queries": st.integers(1, 40),
        "keys": st.lists(st.integers(1, 40), min_size=1, max_size=3),
        "batch": st.integers(1, 2),
        "groups": st.sampled_from([1, 2]),
        "heads": st.sampled_from([2, 4]),
        "size": st.sampled_from([8, 16, 40]),
    }
)


def whole(query, key, value, hidden):
    """Attention in fp64, and its lse."""
    key, value = (t.repeat_interleave(query.size(2) // t.size(2), dim=2) for t in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) * SCALE
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), value), scores.logsumexp(-1)


def draw(shape, keys, dtype):
    """Return queries, keys and values, and a gradient of the result."""
    generator = torch.Generator().manual_seed(len(keys))
    lengths = shape["queries"], sum(keys), sum(keys), shape["queries"]
    heads = shape["heads"], shape["groups"], shape["groups"], shape["heads"]
    return [
        torch.randn(length, shape["batch"], n, shape["size"], generator=generator).to(dtype)
        for length, n in zip(lengths, heads, strict=True)
    ]


@RELAXED
@given(shape=SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_make_the_whole(device, dtype, causal, shape):
    """Causal: the first block is the diagonal, and all of the others is visible, as on a ring's last rank."""
    keys = [shape["queries"], *shape["keys"][1:]] if causal else shape["keys"]
    *tensors, grad = draw(shape, keys, dtype)
    doubles = [t.double().requires_grad_() for t in tensors]
    hidden = torch.zeros(shape["queries"], sum(keys), dtype=torch.bool)
    if causal:
        hidden[:, : keys[0]] = torch.ones(keys[0], keys[0]).triu_(1)
    expected, right_lse = whole(*doubles, hidden)
    right = torch.autograd.grad(expected, doubles, grad.double())

    query, key, value, grad = (t.to(device) for t in (*tensors, grad))
    parts = list(zip(key.split(keys), value.split(keys), [causal] + [False] * len(keys), strict=False))
    output, lse = attention_block(query, *parts[0][:2], SCALE, causal)
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    assert output.is_contiguous()
    output = output.float()
    for part in parts[1:]:
        ring.merge(output, lse, *attention_block(query, *part[:2], SCALE, False))
    assert_near(output, expected, dtype, "output")
    assert_near(lse, right_lse, dtype, "lse")

    output = output.to(dtype)
    ours = [
        attention_block_backward(grad, Residuals(query, k, v, output, lse), SCALE, diagonal)
        for k, v, diagonal in parts
    ]
    assert all(gradient.dtype is dtype for part in ours for gradient in part)
    of_query, of_key, of_value = zip(*ours, strict=True)
    assert_near(sum(g.float() for g in of_query), right[0], dtype, "gradient of query", 2.0)
    assert_near(torch.cat(of_key), right[1], dtype, "gradient of key", 2.0)
    assert_near(torch.cat(of_value), right[2], dtype, "gradient of value", 2.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_balanced_ring_sees_every_visible_pair_once(size):
    """The chunks r and 2·size - 1 - r of a sequence, whose pairs are causal as a whole."""
    chunk = 3
    chunks = torch.arange(2 * size * chunk).chunk(2 * size)
    own = [torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)]
    for rank in range(size):
        seen = torch.zeros(2 * chunk, 2 * size * chunk, dtype=torch.int)
        for step in range(size):
            first, keys, diagonal = ring.visible_block(step, rank, chunk, True)
            columns = own[(rank - step) % size][:keys]
            block = torch.ones(2 * chunk - first, keys, dtype=torch.int)
            seen[first:, columns] += block.tril() if diagonal else block
        assert torch.equal(seen, (own[rank][:, None] >= torch.arange(2 * size * chunk)).int())
