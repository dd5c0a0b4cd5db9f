"""Attention over some of the keys: parts over disjoint keys are the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.ops.attention import ring
from megatron_npu.ops.attention.partial import partial, partial_backward
from tests.ops.proof import RELAXED
from tests.ops.tolerances import assert_near

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


def whole(query, key, value, scale, causal):
    """Attention in fp64, and the logarithm of its divisor."""
    key, value = (t.repeat_interleave(query.size(2) // t.size(2), dim=2) for t in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), value), scores.logsumexp(-1)


def draw(shape, keys):
    generator = torch.Generator().manual_seed(len(keys))
    make = lambda length, heads: torch.randn(  # noqa: E731
        length, shape["batch"], heads, shape["size"], generator=generator, dtype=torch.float64
    )
    return make(shape["queries"], shape["heads"]), *(make(sum(keys), shape["groups"]) for _ in range(2))


@RELAXED
@given(shape=SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_parts_make_the_whole(device, dtype, causal, shape):
    """Causal: the first part is the diagonal, and later parts lie before it, as on a ring's later ranks."""
    keys = [shape["queries"], *shape["keys"][1:]] if causal else shape["keys"]
    tensors = [t.to(dtype) for t in draw(shape, keys)]
    doubles = [t.double().requires_grad_() for t in tensors]
    query, key, value = (t.to(device) for t in tensors)
    scale = 0.3
    if causal and len(keys) > 1:  # everything behind the first part is visible to all
        ends = keys[0]
        first, rest = (doubles[1][:ends], doubles[2][:ends]), (doubles[1][ends:], doubles[2][ends:])
        a, a_total = whole(doubles[0], *first, scale, True)
        b, b_total = whole(doubles[0], *rest, scale, False)
        total = torch.logaddexp(a_total, b_total)
        share = lambda x: (x - total).exp().permute(2, 0, 1).unsqueeze(-1)  # noqa: E731
        expected = a * share(a_total) + b * share(b_total)
    else:
        expected, total = whole(*doubles, scale, causal)
    pieces = [
        (key_part, value_part)
        for key_part, value_part in zip(key.split(keys), value.split(keys), strict=True)
    ]
    output, divisor = partial(query, *pieces[0], scale, causal)
    assert (output.dtype, divisor.dtype) == (dtype, torch.float32)
    assert output.is_contiguous()
    output = output.float()
    for piece in pieces[1:]:
        ring._merge(output, divisor, *partial(query, *piece, scale, False))
    assert_near(output, expected, dtype, "output")
    assert_near(divisor, total, dtype, "logarithm of the divisor")

    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    right = torch.autograd.grad(expected, doubles, grad.double())
    ours = [
        partial_backward(grad.to(device), query, *piece, output.to(dtype), divisor, scale, causal and i == 0)
        for i, piece in enumerate(pieces)
    ]
    assert all(g.dtype is dtype for part in ours for g in part)
    query_grad = sum(part[0].float() for part in ours)
    assert_near(query_grad, right[0], dtype, "gradient of query", 2.0)
    for i, name in ((1, "key"), (2, "value")):
        assert_near(torch.cat([part[i] for part in ours]), right[i], dtype, f"gradient of {name}", 2.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_balanced_ring_sees_every_visible_pair_once(size):
    """The chunks r and 2·size - 1 - r of a sequence, whose pairs are causal as a whole."""
    chunk = 3
    chunks = torch.arange(2 * size * chunk).chunk(2 * size)
    own = [torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)]
    for rank in range(size):
        seen = torch.zeros(2 * chunk, 2 * size * chunk, dtype=torch.int)
        for step in range(size):
            first, keys, diagonal = ring._seen(step, rank, chunk, True)
            columns = own[(rank - step) % size][:keys]
            block = torch.ones(2 * chunk - first, keys, dtype=torch.int)
            seen[first:, columns] += block.tril() if diagonal else block
        assert torch.equal(seen, (own[rank][:, None] >= torch.arange(2 * size * chunk)).int())
