"""The CPU's attention tile by tile: any tiling gives the same result, and memory follows what is visible."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_npu.ops.attention import PackedSequences, attention, cpu, reference
from megatron_npu.ops.attention.blockwise import blockwise, fused, products, tiles
from megatron_npu.ops.attention.spec import (
    AttentionSpec,
    Segment,
    dense_segments,
    packed_segments,
    visible_ranges,
)
from megatron_npu.ops.compiled import attention as kernel
from tests.ops.against_fp64 import assert_as_exact
from tests.ops.attention_formula import formula, visible
from tests.support.tolerances import assert_near


@pytest.fixture(autouse=True)
def on_the_cpu():
    reference.operation.bind("cpu")


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Make several tiles of anything."""
    monkeypatch.setattr(tiles, "TILE_ROWS", 4)
    monkeypatch.setattr(tiles, "TILE_ROWS_OF_ALL_KEYS", 5)
    monkeypatch.setattr(tiles, "TILE_AREA", 50)


limits = st.none() | st.integers(0, 12)


@settings(max_examples=60)
@given(
    queries=st.integers(1, 23),
    keys=st.integers(1, 23),
    groups=st.sampled_from([(2, 2), (6, 2), (6, 1), (5, 1)]),
    causal=st.booleans(),
    window=st.tuples(limits, limits),
    offset=st.integers(-4, 12),
    masked=st.booleans(),
)
def test_any_tiling(tiny_tiles, queries, keys, groups, causal, window, offset, masked):
    """Rows, heads and batches cut anywhere, with a mask and without."""
    torch.manual_seed(0)
    heads, key_heads = groups
    shapes = [(2, heads, queries, 4), (2, key_heads, keys, 4), (2, key_heads, keys, 4)]
    leaves = [torch.randn(s, requires_grad=True) for s in shapes]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    mask = torch.rand(2, heads, queries, keys) < 0.3 if masked else None
    segments = dense_segments(queries, keys, causal, window, offset)
    actual = blockwise(*leaves, AttentionSpec("BNSD", heads, key_heads, 0.5, segments, masked=masked), mask)
    pairs = visible(queries, keys, causal, window, offset)
    expected = formula(*doubles, 0.5, pairs if mask is None else pairs & ~mask)
    assert_near(actual, expected, torch.float32)
    grad = torch.randn(expected.shape)
    ours = torch.autograd.grad(actual, leaves, grad)
    for index, (left, right) in enumerate(
        zip(ours, torch.autograd.grad(expected, doubles, grad.double()), strict=True)
    ):
        assert_near(left, right, torch.float32, f"gradient {index}")


@settings(max_examples=50)
@given(
    queries=st.integers(0, 12),
    keys=st.integers(0, 12),
    causal=st.booleans(),
    window=st.tuples(limits, limits),
    offset=st.sampled_from([0, 5, -3, "end"]),
)
def test_a_segment_knows_what_is_visible(queries, keys, causal, window, offset):
    (segment,) = dense_segments(queries, keys, causal, window, offset)
    pairs = visible(queries, keys, causal, window, keys - queries if offset == "end" else offset)
    rows = pairs.any(1).nonzero().flatten().tolist()
    first, last = segment.rows_with_keys()
    assert list(range(first, last)) == rows
    assert segment.has_fully_masked_rows() == (len(rows) < queries)
    if rows:
        columns = pairs.any(0).nonzero().flatten().tolist()
        assert segment.visible_keys(first, last) == (columns[0], columns[-1] + 1)
    begins, ends = visible_ranges((segment,), torch.device("cpu"))
    position = torch.arange(keys)
    assert torch.equal(pairs, (position >= begins[:, None]) & (position < ends[:, None]))


def test_limits_that_forbid_nothing_are_dropped():
    """65536/65536 at 8,192 tokens is plain causal attention, which has torch's own kernel."""
    (wide,) = dense_segments(8192, 8192, True, (65536, 65536), 0)
    assert wide == Segment(0, 8192, 0, 8192, None, 0)
    tensor = torch.empty(8192, 1, 1, 8, device="meta")
    assert cpu.torch_has_a_kernel(tensor, tensor, AttentionSpec("SBND", 1, 1, 1.0, (wide,)))
    segments = packed_segments(PackedSequences((3, 5), (3, 5)), True, (4, None), 0)
    assert {s.window_left for s in segments} == {None}


class Sizes(TorchDispatchMode):
    """Records the bytes of every tensor that any operation returns, those of autograd's functions too."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
                self.total += leaf.numel() * leaf.element_size()
        return result


def sizes_of(length, dtype=torch.float32, heads=(2, 2), **call):
    """Return what forward and backward of one call touch, and the bytes of the queries in fp32."""
    torch.manual_seed(0)
    leaves = [torch.randn(length, n, 16).to(dtype).requires_grad_() for n in (heads[0], *heads[1:] * 2)]
    if "packed" not in call:
        leaves = [t.detach()[:, None].requires_grad_() for t in leaves]
    layout = "TND" if "packed" in call else "SBND"
    with Sizes() as sizes:
        output = attention(*leaves, layout=layout, scale=0.25, **call)
        output.backward(torch.ones_like(output))
    return sizes, length * heads[0] * 16 * 4


WINDOWS = {
    "window": lambda s: {"causal": True, "window": (100, 0)},
    "both sides": lambda s: {"window": (60, 40)},
    "dropout": lambda s: {"causal": True, "window": (100, 0), "dropout_p": 0.1},
    "packed": lambda s: {"causal": True, "packed": PackedSequences((64,) * (s // 64), (64,) * (s // 64))},
    "packed window": lambda s: {"causal": True, "packed": PackedSequences((s,), (s,)), "window": (50, None)},
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_windows_and_packed_sequences_cost_what_is_visible(case, dtype):
    """Twice the tokens touch twice the bytes, and no tensor is larger than the queries or one tile."""
    short, _ = sizes_of(2048, dtype, **WINDOWS[case](2048))
    long, queries = sizes_of(4096, dtype, **WINDOWS[case](4096))
    assert long.total <= 2.1 * short.total
    assert long.largest <= max(queries, 256 * (256 + 100) * 2 * 4)
    assert long.largest < 4096**2 / 8  # not even one bit for each pair


def test_dropout_of_the_whole_triangle_needs_no_square(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_AREA", 1 << 16)
    sizes, queries = sizes_of(2048, causal=True, dropout_p=0.1)
    assert sizes.largest <= max(queries, 4 << 16)


@pytest.mark.parametrize("by_one_kernel", [False, True])
def test_what_is_saved(monkeypatch, by_one_kernel):
    """The arguments alone; of the kernel, the output, too, which the next layer keeps, and a number a row."""
    if by_one_kernel and not kernel.takes(torch.float32):
        pytest.skip("no kernel: it needs g++ and AVX-512")
    monkeypatch.setattr(fused.attention, "takes", lambda dtype: by_one_kernel)
    leaves = [torch.randn(512, 1, 2, 16, requires_grad=True) for _ in range(3)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = attention(*leaves, layout="SBND", scale=0.25, causal=True, window=(100, 0), dropout_p=0.1)
    expected = {t.data_ptr() for t in (*leaves, *([output] if by_one_kernel else []))}
    others = [t for t in saved if t.data_ptr() not in expected]
    assert {t.data_ptr() for t in saved} >= expected
    assert [t.numel() for t in others] == ([2 * 512] if by_one_kernel else [])


def test_long_windows_shrink_the_rows_of_a_tile():
    """One row of scores may be long; a tile of them is not."""
    segments = dense_segments(100_000, 100_000, True, (None, None), 0)
    case = AttentionSpec("SBND", 1, 1, 1.0, segments, dropout_p=0.1)
    shapes = [tile.shape for tile in tiles.tiles(1, case)]
    assert all(h * rows * keys <= tiles.TILE_AREA for h, rows, keys in shapes)
    assert sum(rows for _, rows, _ in shapes) == 100_000


def test_products_are_rounded_to_bf16_only_meanwhile():
    """The process's own setting comes back, after an error too, and fp32 calls never change it."""
    switch = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    with contextlib.suppress(ZeroDivisionError), products.bf16_products(torch.bfloat16):
        assert switch.fp32_precision == "bf16"
        raise ZeroDivisionError
    assert switch.fp32_precision == before
    with products.bf16_products(torch.float32):
        assert switch.fp32_precision == before


def test_scores_of_fp16_do_not_overflow():
    """q·k of 80,000 is beyond fp16, the score after the scale is not."""
    query = torch.full((1, 1, 3, 8), 100.0, dtype=torch.float16, requires_grad=True)
    output = attention(query, query, query, layout="BNSD", scale=0.01, window=(1, 1))
    assert torch.equal(output, query)
    output.sum().backward()
    assert torch.isfinite(query.grad).all()


def test_backward_of_backward_is_refused():
    query = torch.randn(1, 1, 6, 4, requires_grad=True)
    output = attention(query, query, query, layout="BNSD", scale=0.5, window=(1, 0))
    (grad,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_without_dropout_the_generator_rests():
    query = torch.randn(1, 1, 6, 4)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    attention(query, query, query, layout="BNSD", scale=0.5, causal=True, window=(2, 0))
    assert torch.equal(torch.rand(3), expected)


@settings(max_examples=30)
@given(
    queries=st.integers(1, 23),
    keys=st.integers(1, 23),
    groups=st.sampled_from([(2, 2), (6, 2)]),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_bf16_in_any_tiling(tiny_tiles, queries, keys, groups, causal, masked):
    """Rounded are the arguments, the weights and the gradients of the scores; sums of tiles are not."""
    torch.manual_seed(0)
    heads, key_heads = groups
    shapes = [(2, heads, queries, 4), (2, key_heads, keys, 4), (2, key_heads, keys, 4)]
    leaves = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    mask = torch.rand(2, heads, queries, keys) < 0.3 if masked else None
    segments = dense_segments(queries, keys, causal, (None, None), 0)
    case = AttentionSpec("BNSD", heads, key_heads, 0.5, segments, masked=masked)
    assert_as_exact(blockwise(*leaves, case, mask), leaves, blockwise(*doubles, case, mask), doubles)


@pytest.mark.parametrize(
    ("dtype", "amx", "mkl", "queries", "tiled"),
    [
        (torch.bfloat16, False, False, 64, True),
        (torch.bfloat16, True, True, 64, False),  # torch's kernel has AMX, too
        (torch.float32, False, False, 64, True),
        (torch.float32, False, True, 64, False),  # and MKL is Intel's
        (torch.float64, False, False, 64, False),
        (torch.bfloat16, False, False, 4, False),  # a few words after a cache
    ],
)
def test_tiles_take_what_they_are_faster_with(monkeypatch, dtype, amx, mkl, queries, tiled):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(cpu, "faster_than_torch", lambda dtype: not mkl)
    monkeypatch.setattr(fused, "takes", lambda query, mask: query.dtype is torch.float32)
    case = AttentionSpec("BNSD", 2, 2, 1.0, dense_segments(queries, 64, True, (None, None), "end"))
    query = torch.empty(1, 2, queries, 8, dtype=dtype)
    assert cpu.tiles_are_faster(query, case) == tiled
    masked = replace(case, masked=True)  # which the kernel for fp32 does not know
    assert cpu.tiles_are_faster(query, masked) == (tiled and dtype is not torch.float32)
