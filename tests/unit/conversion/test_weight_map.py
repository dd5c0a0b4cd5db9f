"""Each layout against its definition, element by element, and against its own inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.conversion import weight_map


@st.composite
def heads(draw) -> weight_map.Heads:
    groups = draw(st.integers(1, 3))
    return weight_map.Heads(
        queries=groups * draw(st.integers(1, 3)),
        groups=groups,
        size=draw(st.sampled_from([2, 4, 6])),
        rotary_interleaved=draw(st.booleans()),
    )


def numbered(*shape: int) -> torch.Tensor:
    """Return a tensor whose elements all differ."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def inverse(mapping: weight_map.WeightMapping, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensor of Megatron, from which the same tensors come back, also as to shapes on meta."""
    joined = mapping.to_megatron(tensors)
    for part, meta, tensor in zip(
        mapping.to_hf(joined), mapping.to_hf(joined.to("meta")), tensors, strict=True
    ):
        assert torch.equal(part, tensor)
        assert meta.shape == tensor.shape
    return joined


@settings(max_examples=25)
@given(heads=heads(), columns=st.sampled_from([(), (5,)]))
def test_qkv_is_a_key_its_queries_and_its_value_group_by_group(heads, columns):
    query = numbered(heads.queries * heads.size, *columns)
    key = 1e3 + numbered(heads.groups * heads.size, *columns)
    value = 2e3 + numbered(heads.groups * heads.size, *columns)
    joined = inverse(weight_map.qkv("m", ("q", "k", "v"), heads), [query, key, value])
    shared = heads.queries // heads.groups
    half = heads.size // 2
    place = {i: (i // 2 + (i % 2) * half if heads.rotary_interleaved else i) for i in range(heads.size)}
    row = 0
    for group in range(heads.groups):
        for head in range(shared):
            for i in range(heads.size):
                assert torch.equal(joined[row], query[(group * shared + head) * heads.size + place[i]])
                row += 1
        for i in range(heads.size):
            assert torch.equal(joined[row], key[group * heads.size + place[i]])
            row += 1
        for i in range(heads.size):
            assert torch.equal(joined[row], value[group * heads.size + i])
            row += 1
    assert row == len(joined)


@pytest.mark.parametrize("columns", [(), (5,)], ids=["bias", "weight"])
def test_thirds_of_gpt2(columns):
    heads = weight_map.Heads(queries=3, groups=3, size=2)
    rows = numbered(18, *columns)
    stored = rows.t() if columns else rows
    joined = inverse(weight_map.fused_qkv("m", "c_attn", heads), [stored])
    expected = [third * 6 + head * 2 + i for head in range(3) for third in range(3) for i in range(2)]
    assert torch.equal(joined, rows[expected])


def test_transposed_stacked_and_same():
    assert torch.equal(inverse(weight_map.transposed("m", "h"), [numbered(2, 3)]), numbered(2, 3).t())
    parts = [numbered(2, 3), 10 + numbered(2, 3)]
    assert torch.equal(inverse(weight_map.concatenated("m", ("gate", "up")), parts), torch.cat(parts))
    assert torch.equal(inverse(weight_map.direct("m", "h"), [numbered(3)]), numbered(3))


@settings(max_examples=25)
@given(rows=st.integers(1, 40), padding=st.integers(0, 40), seed=st.integers(0, 99), far=st.floats(-200, 200))
def test_padding_rows_take_their_share_of_the_softmax_at_most(rows, padding, seed, far):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    weight[:, 0] = far  # moves all logits, as OpenAI's GPT-2 has them
    joined = inverse(weight_map.padded_vocabulary("m", "h", rows, rows + padding), [weight])
    hidden = torch.randn(8, generator=generator, dtype=torch.float64).abs() * 3
    logits = joined @ hidden
    added = logits.logsumexp(0) - logits[:rows].logsumexp(0)
    # the mean is taken in fp32, so that the bound is kept but for its rounding
    assert added <= torch.log1p(torch.tensor(padding / rows)) + 1e-3


def test_half_precision_is_padded_in_fp32():
    weight = torch.full((1000, 2), 0.3, dtype=torch.bfloat16)
    joined = weight_map.padded_vocabulary("m", "h", 1000, 1024).to_megatron([weight])
    assert joined.dtype == torch.bfloat16
    assert torch.equal(joined[1000:], weight[:24])
