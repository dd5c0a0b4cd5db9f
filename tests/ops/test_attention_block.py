"""Attention over blocks of the keys: disjoint blocks make the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu import devices
from megatron_npu.ops.attention.block import Residuals, attention_block, attention_block_backward
from megatron_npu.ops.attention.context_parallel import ring
from megatron_npu.ops.attention.context_parallel.visible import Document, union, visible_parts, within
from megatron_npu.ops.attention.spec import AttentionSpec, Segment, dense_segments, forbidden_pairs
from tests.ops.against_fp64 import RELAXED
from tests.support.tolerances import assert_near

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


def block_of(query, key, causal, window=(None, None), dropout_p=0.0):
    """Return the spec of one dense block."""
    segments = dense_segments(query.size(0), key.size(0), causal, window, 0)
    return AttentionSpec("SBND", query.size(2), key.size(2), SCALE, segments, dropout_p=dropout_p)


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
    specs = [block_of(query, k, causal and not i) for i, k in enumerate(key.split(keys))]
    parts = list(zip(key.split(keys), value.split(keys), specs, strict=True))
    output, lse, drawn = attention_block(query, *parts[0])
    assert drawn == ()
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    assert output.is_contiguous()
    output = output.float()
    for part in parts[1:]:
        ring.merge(output, lse, *attention_block(query, *part)[:2])
    assert_near(output, expected, dtype, "output")
    assert_near(lse, right_lse, dtype, "lse")

    output = output.to(dtype)
    ours = [
        attention_block_backward(grad, Residuals(query, k, v, output, lse), spec, ()) for k, v, spec in parts
    ]
    assert all(gradient.dtype is dtype for part in ours for gradient in part)
    of_query, of_key, of_value = zip(*ours, strict=True)
    assert_near(sum(g.float() for g in of_query), right[0], dtype, "gradient of query", 2.0)
    assert_near(torch.cat(of_key), right[1], dtype, "gradient of key", 2.0)
    assert_near(torch.cat(of_value), right[2], dtype, "gradient of value", 2.0)


def test_bands_and_packed_sequences_are_those_of_the_whole(device, dtype):
    """A band that a run of tiles covers, and two sequences in one call, of one key head for two queries'."""
    shape = {"queries": 300, "batch": 1, "heads": 4, "groups": 2, "size": 16}
    band = Segment(0, 300, 0, 290, 20, 30)
    packed = Segment(0, 100, 0, 100, None, 0), Segment(100, 300, 100, 290, None, 0)
    for segments in ((band,), packed):
        spec = AttentionSpec("SBND", 4, 2, SCALE, segments, len(segments) > 1)
        *tensors, grad = draw(shape, [290], dtype)
        doubles = [t.double().requires_grad_() for t in tensors]
        hidden = torch.ones(300, 290, dtype=torch.bool)
        for s in segments:
            forbidden = forbidden_pairs(s, torch.device("cpu"))
            hidden[s.q0 : s.q1, s.k0 : s.k1] = False if forbidden is None else forbidden
        expected, right_lse = whole(*doubles, hidden)
        right = torch.autograd.grad(expected, doubles, grad.double())
        query, key, value, grad = (t.to(device) for t in (*tensors, grad))
        output, lse, drawn = attention_block(query, key, value, spec)
        assert_near(output, expected, dtype, "output")
        assert_near(lse, right_lse, dtype, "lse")
        ours = attention_block_backward(grad, Residuals(query, key, value, output, lse), spec, drawn)
        for name, a, b in zip(("query", "key", "value"), ours, right, strict=True):
            assert_near(a, b, dtype, f"gradient of {name}", 2.0)


def test_dropout_is_the_same_in_backward(device):
    """Values that are unit vectors show the dropped weights; with these the gradients are autograd's."""
    torch.manual_seed(5)
    query, key, value, grad = (torch.randn(200, 1, 2, 200) for _ in range(4))
    tensors = [t.to(device) for t in (query, key, value, grad)]
    spec = block_of(query, key, True, (150, None), dropout_p=0.25)
    state = devices.current().rng_state()
    unit = torch.eye(200)[:, None, None].expand(200, 1, 2, 200)
    dropped = attention_block(tensors[0], tensors[1], unit.to(device), spec)[0].cpu()
    devices.current().set_rng_state(state)
    output, lse, drawn = attention_block(*tensors[:3], spec)
    ours = attention_block_backward(tensors[3], Residuals(*tensors[:3], output, lse), spec, drawn)
    assert drawn

    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    scores = torch.einsum("ibnd,jbnd->bnij", *leaves[:2]) * SCALE
    hidden = forbidden_pairs(spec.segments[0], torch.device("cpu"))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    kept = (dropped.permute(1, 2, 0, 3) != 0) / 0.75
    share = float((kept != 0).sum() / (~hidden).sum() / 2)
    assert abs(share - 0.75) < 0.02
    expected = torch.einsum("bnij,jbnd->ibnd", weights * kept, leaves[2])
    assert_near(output, expected, torch.float32, "output")
    right = torch.autograd.grad(expected, leaves, grad.double())
    for name, a, b in zip(("query", "key", "value"), ours, right, strict=True):
        assert_near(a, b, torch.float32, f"gradient of {name}", 2.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (2, 0), (4, 3), (0, 0), (None, 1), (7, None)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_visible_pair_is_seen_once(size, window, causal):
    """Documents of one and three tokens a chunk, the second with padding in its last chunks."""
    chunks, lengths = (1, 3), (2 * size, 6 * size - 4)
    documents = tuple(Document(2 * c, n) for c, n in zip(chunks, lengths, strict=True))
    place = [(0, t) for t in range(2 * size)] + [(1, t) for t in range(6 * size)]
    own = []
    for rank in range(size):
        mine = []
        for number, c in enumerate(chunks):
            for half in (rank, 2 * size - 1 - rank):
                mine += [(number, t) for t in range(half * c, (half + 1) * c)]
        own.append(mine)
    left, right = (len(place) if limit is None else limit for limit in window)
    right = min(right, 0) if causal else right
    for rank in range(size):
        seen = {}
        for source in range(size):
            for part in visible_parts(rank, source, size, documents, causal, window):
                queries = [own[rank][i] for first, last in part.queries for i in range(first, last)]
                keys = [own[source][i] for first, last in part.keys for i in range(first, last)]
                assert len(queries) == part.segments[-1].q1
                assert len(keys) == part.segments[-1].k1
                for s in part.segments:
                    forbidden = forbidden_pairs(s, torch.device("cpu"))
                    assert not s.has_fully_masked_rows()
                    for i in range(s.q0, s.q1):
                        for j in range(s.k0, s.k1):
                            if forbidden is None or not forbidden[i - s.q0, j - s.k0]:
                                pair = queries[i], keys[j]
                                seen[pair] = seen.get(pair, 0) + 1
        visible = {
            (q, k): 1
            for q in own[rank]
            for k in place
            if q[0] == k[0] and -left <= k[1] - q[1] <= right and (causal or k[1] < lengths[k[0]])
        }
        if causal:  # what becomes of queries that are padding nobody reads, and no other sees a key that is
            seen = {pair: n for pair, n in seen.items() if pair[0][1] < lengths[pair[0][0]]}
            visible = {pair: n for pair, n in visible.items() if pair[0][1] < lengths[pair[0][0]]}
        assert seen == visible


def test_a_part_is_found_within_what_was_sent():
    assert union([(6, 9), (0, 2), (2, 4)]) == ((0, 4), (6, 9))
    assert within(((1, 3), (6, 8)), ((0, 4), (6, 9))) == ((1, 3), (4, 6))
