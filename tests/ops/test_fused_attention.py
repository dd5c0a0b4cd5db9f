"""Attention by one kernel of ours (``attention.cpp``) against fp64, forward and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_npu.ops import compiled
from megatron_npu.ops.attention import PackedSequences, attention, cpu, reference
from megatron_npu.ops.attention.blockwise import blockwise, fused
from megatron_npu.ops.attention.spec import AttentionSpec, dense_segments
from megatron_npu.ops.compiled import attention as kernel
from megatron_npu.ops.compiled import library, products
from megatron_npu.ops.compiled.products import Arithmetic
from tests.ops import attention_rounding
from tests.ops.against_fp64 import assert_as_exact
from tests.ops.attention_formula import visible

pytestmark = pytest.mark.skipif(library() is None, reason="no g++, or threads not of libgomp")
# one block, of 112 rows or 192 keys, and several; more than 16 heads, and fewer
limits = st.none() | st.integers(0, 40) | st.integers(100, 300)
runs = st.integers(1, 40) | st.integers(100, 240) | st.integers(370, 400)


@pytest.fixture(autouse=True, params=[None, *Arithmetic], ids=lambda each: each.name if each else "fp32")
def dtype(request, monkeypatch):
    """Let this processor be one for the kernel in an arithmetic; return the dtype of its factors."""
    if request.param is Arithmetic.PAIRED and not library().can_pair():
        pytest.skip("the processor has no instruction for pairs of bf16")
    monkeypatch.setattr(products, "_arithmetic", lambda: request.param)
    monkeypatch.setattr(products, "has_avx512", lambda: True)
    monkeypatch.setattr(cpu, "tiles_are_faster", lambda query, spec: True)
    reference.operation.bind("cpu")
    return torch.bfloat16 if request.param else torch.float32


def leaves_of(dtype, *shapes):
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return leaves, [leaf.detach().double().requires_grad_() for leaf in leaves]


@settings(max_examples=60)
@given(
    queries=runs,
    keys=runs,
    groups=st.sampled_from([(2, 2), (6, 2), (5, 1), (9, 9)]),
    sizes=st.sampled_from([(8, 8, 0.3), (33, 17, 0.3), (64, 40, 0.3), (256, 200, 0.06)]),  # and the scale
    causal=st.booleans(),
    window=st.tuples(limits, limits),
    offset=st.integers(-4, 30) | st.integers(150, 250),
)
# the gradient of one key sums the roundings of many queries
@example(100, 2, (2, 2), (64, 40, 0.3), False, (None, None), 0)
def test_any_window(dtype, queries, keys, groups, sizes, causal, window, offset):
    torch.manual_seed(0)
    heads, key_heads = groups
    size, value_size, scale = sizes
    shapes = [(2, heads, queries, size), (2, key_heads, keys, size), (2, key_heads, keys, value_size)]
    leaves, doubles = leaves_of(dtype, *shapes)
    segments = dense_segments(queries, keys, causal, window, offset)
    spec = AttentionSpec("BNSD", heads, key_heads, scale, segments)
    assert fused.takes(leaves[0], None)
    assert not fused.takes(doubles[0], None)
    pairs = visible(queries, keys, causal, window, offset)
    attention_rounding.compare(lambda *qkv: blockwise(*qkv, spec, None), leaves, scale, pairs)


@pytest.mark.parametrize("layout", ["SBND", "BSND", "BNSD"])
def test_columns_of_a_split_product(dtype, layout):
    """Queries, keys and values whose heads are further apart than they are long."""
    torch.manual_seed(1)
    shape = {"SBND": (90, 2, 3, 96), "BSND": (2, 90, 3, 96), "BNSD": (2, 3, 90, 96)}[layout]
    (leaf,), (double,) = leaves_of(dtype, shape)

    def attend(tensor):
        return attention(*tensor.split(32, -1), layout=layout, scale=0.2, causal=True)

    assert_as_exact(attend(leaf), [leaf], attend(double), [double])


def test_packed_sequences(dtype):
    torch.manual_seed(2)
    leaves, doubles = leaves_of(dtype, *[(170, 3, 16)] * 3)
    packed = PackedSequences((30, 0, 1, 139), (30, 0, 1, 139))

    def attend(tensors):
        return attention(*tensors, layout="TND", scale=0.25, causal=True, packed=packed)

    assert_as_exact(attend(leaves), leaves, attend(doubles), doubles)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_drops_the_same_going_backward(dtype, causal):
    """Values are a unit matrix, and the output the weights: which ones were kept can be seen."""
    torch.manual_seed(3)
    length, p = 230, 0.25
    leaves, doubles = leaves_of(dtype, (2, 3, length, 16), (2, 3, length, 16), (2, 3, length, length))
    for value in (leaves[2], doubles[2]):
        value.data = torch.eye(length, dtype=value.dtype).expand(2, 3, -1, -1).contiguous()
    output = attention(*leaves, layout="BNSD", scale=0.25, causal=causal, dropout_p=p)
    scores = doubles[0] @ doubles[1].mT * 0.25
    beyond = torch.ones(length, length, dtype=torch.bool).triu(1) & causal
    kept = (output != 0) & ~beyond
    weights = scores.masked_fill(beyond, -torch.inf).softmax(-1) * kept / (1 - p)
    assert abs(kept.sum() / (~beyond).expand_as(kept).sum() - (1 - p)) < 0.02
    assert_as_exact(output, leaves, weights @ doubles[2], doubles)


def test_any_number_of_threads_has_the_same_bits(dtype):
    torch.manual_seed(4)
    before, found = torch.get_num_threads(), []
    leaves, _ = leaves_of(dtype, *[(460, 1, 5, 16)] * 3)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(5)
        output = attention(*leaves, layout="SBND", scale=0.25, causal=True, dropout_p=0.1)
        found.append((output, *torch.autograd.grad(output.float().square().sum(), leaves)))
    torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_what_the_kernel_does_not_take(dtype, monkeypatch):
    """Masks, fp64, and everything without the kernels; fp16 is multiplied in fp32."""
    query = torch.ones(1, 2, 20, 8).to(dtype)
    assert fused.takes(query, None)
    assert fused.takes(query.half(), None)
    assert not fused.takes(query, torch.ones(1, 1, 20, 20, dtype=torch.bool))
    assert not fused.takes(query.double(), None)
    monkeypatch.setattr(kernel, "library", lambda: None)
    monkeypatch.setattr(products, "library", lambda: None)
    assert not fused.takes(query, None)
    assert compiled.available()
