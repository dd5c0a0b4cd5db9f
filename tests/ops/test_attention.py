"""ops.attention against the formula in fp64: output, every gradient, dtype and strides, on each device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_npu.ops.attention import PackedSequences, attention
from tests.ops.against_fp64 import EXAMPLES
from tests.ops.attention_formula import LAYOUTS, formula, in_layout, packed_formula, visible
from tests.support.tolerances import assert_near

RELAXED = settings(max_examples=EXAMPLES)
SCALE = 0.3

sizes = st.integers(1, 19)
limits = st.none() | st.integers(0, 25)
head_counts = st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)])


def leaves(dtype, device, *shapes):
    """Return tensors that need gradients, their values the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def compare(dtype, ours, tensors, right):
    """Compare ``ours``, a function of ``tensors``, with ``right`` in fp64 on the host, gradients too."""
    doubles = [t.detach().cpu().double().requires_grad_() for t in tensors]
    actual, expected = ours(*tensors), right(*doubles)
    assert actual.dtype is dtype
    assert actual.device.type == tensors[0].device.type
    assert_near(actual.cpu(), expected, dtype)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(actual, tensors, grad.to(actual.device))
    precise = torch.autograd.grad(expected, doubles, grad.double())
    for index, (left, right) in enumerate(zip(gradients, precise, strict=True)):
        assert left.dtype is dtype
        assert_near(left.cpu(), right, dtype, f"gradient {index}")


def check(dtype, device, shapes, layout="BNSD", mask=None, **call):
    """Check ``[b, n, s, d]`` ``shapes`` in ``layout``."""
    queries, keys = shapes[0][2], shapes[1][2]
    offset = keys - queries if call.get("offset") == "end" else call.get("offset", 0)
    pairs = visible(queries, keys, call.get("causal", False), call.get("window", (None, None)), offset)
    if mask is not None:
        pairs = pairs & ~mask
        call["mask"] = mask.to(device)
    heads = shapes[0][1]
    if layout in ("SBH", "BSH"):
        call["num_heads"] = heads

    def ours(*tensors):
        output = attention(
            *(in_layout(t, layout).contiguous() for t in tensors), layout=layout, scale=SCALE, **call
        )
        assert output.is_contiguous()
        return in_layout(output, layout, heads, back=True)

    compare(dtype, ours, leaves(dtype, device, *shapes), lambda q, k, v: formula(q, k, v, SCALE, pairs))


@RELAXED
@given(
    queries=sizes,
    batch=st.integers(1, 3),
    groups=head_counts,
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    window=st.tuples(limits, limits),
)
@example(queries=1, batch=1, groups=(1, 1), layout="SBH", causal=True, window=(0, 0))
@example(queries=19, batch=2, groups=(4, 2), layout="BSH", causal=True, window=(0, 0))
def test_self_attention(device, dtype, queries, batch, groups, layout, causal, window):
    heads, key_heads = groups
    shapes = [(batch, heads, queries, 8)] + [(batch, key_heads, queries, 8)] * 2
    check(dtype, device, shapes, layout, causal=causal, window=window)


@RELAXED
@given(
    queries=sizes,
    keys=sizes,
    groups=head_counts,
    offset=st.sampled_from([0, 3, -2, "end"]),
    causal=st.booleans(),
    window=st.tuples(limits, limits),
)
@example(
    queries=9, keys=4, groups=(4, 2), offset="end", causal=True, window=(None, None)
)  # fully masked rows
@example(queries=1, keys=9, groups=(4, 2), offset=-2, causal=True, window=(None, None))
@example(queries=1, keys=9, groups=(4, 2), offset="end", causal=True, window=(3, 0))  # decoding
def test_cross_attention(device, dtype, queries, keys, groups, offset, causal, window):
    """Other keys than queries: cross attention, decoding with cached keys, chunks of a long sequence."""
    heads, key_heads = groups
    shapes = [(2, heads, queries, 8)] + [(2, key_heads, keys, 8)] * 2
    check(dtype, device, shapes, causal=causal, window=window, offset=offset)


@RELAXED
@given(
    queries=sizes,
    keys=sizes,
    groups=head_counts,
    shape=st.sampled_from(["bnqk", "b1qk", "11qk", "b11k", "111k"]),
    causal=st.booleans(),
    seed=st.integers(0, 9),
)
def test_arbitrary_mask(device, dtype, queries, keys, groups, shape, causal, seed):
    heads, key_heads = groups
    lengths = {"b": 2, "n": heads, "q": queries, "k": keys, "1": 1}
    mask = torch.rand([lengths[c] for c in shape], generator=torch.Generator().manual_seed(seed)) < 0.4
    check(dtype, device, [(2, heads, queries, 8)] + [(2, key_heads, keys, 8)] * 2, mask=mask, causal=causal)


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum)


@RELAXED
@given(
    query=lengths,
    data=st.data(),
    groups=head_counts,
    causal=st.booleans(),
    window=st.tuples(limits, limits),
    offset=st.sampled_from([0, "end"]),
)
def test_packed(device, dtype, query, data, groups, causal, window, offset):
    """TND: sequences of any length, also empty, of queries and of keys."""
    same = st.lists(st.integers(0, 9), min_size=len(query), max_size=len(query)).filter(sum)
    packed = PackedSequences(tuple(query), tuple(data.draw(st.just(query) | same, label="keys")))
    heads, key_heads = groups
    shapes = [(sum(packed.query_lengths), heads, 8)] + [(sum(packed.key_lengths), key_heads, 8)] * 2
    call = {"causal": causal, "window": window, "offset": offset}
    compare(
        dtype,
        lambda *t: attention(*t, layout="TND", packed=packed, scale=SCALE, **call),
        leaves(dtype, device, *shapes),
        lambda q, k, v: packed_formula(q, k, v, SCALE, packed, **call),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows(device, layout):
    """Documents within the rows of a batch: the document mask of --reset-attention-mask."""
    shapes = [(2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8)]
    packed = PackedSequences((5, 7, 12), (5, 7, 12))
    options = {"num_heads": 4} if layout in ("SBH", "BSH") else {}
    same = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    same[0, :, :5, :5] = same[0, :, 5:, 5:] = same[1] = True

    def ours(*tensors):
        rows = (in_layout(t, layout).contiguous() for t in tensors)
        output = attention(*rows, layout=layout, packed=packed, scale=SCALE, causal=True, **options)
        assert output.is_contiguous()
        return in_layout(output, layout, 4, back=True)

    pairs = same & visible(12, 12, True, (None, None), 0)
    compare(
        torch.float32,
        ours,
        leaves(torch.float32, device, *shapes),
        lambda *t: formula(*t, SCALE, pairs),
    )


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (100, None)},
        {"causal": True, "window": (0, 0)},
        {"causal": True, "window": (65536, 65536)},
        {"window": (17, 130)},
        {"causal": True, "offset": 2000},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [(1, 1), (2, 1)], ids=["mha", "gqa"])
def test_long(device, dtype, call, groups):
    """More than one tile, more than 2,048 keys, lengths that no block size divides."""
    heads, key_heads = groups
    queries = 333 if "offset" in call else 2111
    shapes = [(1, heads, queries, 16)] + [(1, key_heads, 2111 + 222 * ("offset" in call), 16)] * 2
    check(dtype, device, shapes, "SBND", **call)


def test_values_of_another_size(device, dtype):
    check(dtype, device, [(2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 12)], "BSND", causal=True)


def test_strided_tensors(device, dtype):
    """Queries, keys and values as Megatron splits them from one projection."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(7, 2, 3, 4 * 8, generator=generator).to(device, dtype).requires_grad_()

    def split(tensor):
        query, key, value = tensor.split([16, 8, 8], dim=-1)
        return query.unflatten(-1, (2, 8)).flatten(2, 3), key, value

    def right(tensor):
        tensors = (t.permute(1, 2, 0, 3) for t in split(tensor))
        return formula(*tensors, SCALE, visible(7, 7, True, (2, None), 0)).permute(2, 0, 1, 3)

    call = {"layout": "SBND", "scale": SCALE, "causal": True, "window": (2, None)}
    compare(dtype, lambda t: attention(*split(t), **call), [mixed], right)


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, 4, 2), (4, 0, 2), (0, 0, 1), (3, 3, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_to_attend_to(device, dtype, queries, keys, batch, causal):
    shapes = [(batch, 2, queries, 8)] + [(batch, 2, keys, 8)] * 2
    tensors = leaves(dtype, device, *shapes)
    output = attention(*tensors, layout="BNSD", scale=SCALE, causal=causal)
    assert output.shape == shapes[0]
    assert not output.any()
    for grad in torch.autograd.grad(output, tensors, torch.ones_like(output)):
        assert not grad.any()


def test_no_sequences_at_all(device):
    tensors = leaves(torch.float32, device, *[(0, 2, 8)] * 3)
    assert attention(*tensors, layout="TND", scale=SCALE, packed=PackedSequences((), ())).shape == (0, 2, 8)


def test_lengths_may_be_lists(device):
    tensors = leaves(torch.float32, device, *[(7, 2, 8)] * 3)
    call = {"layout": "TND", "scale": SCALE, "causal": True}
    lists = attention(*tensors, packed=PackedSequences([3, 4], [3, 4]), **call)
    assert torch.equal(lists, attention(*tensors, packed=PackedSequences((3, 4), (3, 4)), **call))


@pytest.mark.parametrize(
    "call",
    [
        {"causal": True, "offset": -2},
        {"mask": torch.tensor([True] * 3 + [False] * 3)[:, None].expand(6, 6)},
        {"mask": torch.arange(6)[:, None] < 3, "causal": True, "dropout_p": 0.1},
        {"window": (1, 1), "offset": 20},
    ],
    ids=["offset", "mask", "dropout", "far"],
)
def test_fully_masked_rows_are_zero_not_nan(device, dtype, call):
    tensors = leaves(dtype, device, *[(2, 2, 6, 8)] * 3)
    call = {k: v.to(device) if k == "mask" else v for k, v in call.items()}
    output = attention(*tensors, layout="BNSD", scale=SCALE, **call)
    masked_rows = 6 if call.get("offset") == 20 else 2 if call.get("offset") == -2 else 3
    assert not output[:, :, :masked_rows].any()
    assert output[:, :, masked_rows:].ne(0).all()
    grads = torch.autograd.grad(output, tensors, torch.ones_like(output))
    assert all(torch.isfinite(g).all() for g in grads)
    assert not grads[0][:, :, :masked_rows].any()


def test_no_gradient_is_needed(device, dtype):
    tensors = [t.detach() for t in leaves(dtype, device, *[(2, 2, 6, 8)] * 3)]
    assert not attention(*tensors, layout="BNSD", scale=SCALE, causal=True, window=(2, 0)).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "SBH"}, "requires 3 dimensions"),
        ({"layout": "XYZ"}, "layout must be one of"),
        ({"window": (-1, 0)}, "window must not be negative"),
        ({"dropout_p": 1.0}, "dropout_p"),
        ({"mask": torch.zeros(4, 4)}, "boolean"),
        ({"packed": PackedSequences((3,), (3,))}, "packed describes 3 queries"),
        (
            {"packed": PackedSequences((4, 4), (8,))},
            "packed must have as many query lengths as key lengths, but got 2 and 1",
        ),
        ({"packed": PackedSequences((9, -1), (8, 0))}, "the lengths in packed must not be negative"),
        (
            {"packed": PackedSequences((8,), (8,)), "mask": torch.zeros(4, 4, dtype=torch.bool)},
            "must be None for packed sequences",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls(device, change, message):
    x = torch.randn(2, 2, 4, 8, device=device)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, **{"layout": "BNSD", "scale": 1.0, **change})


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (
            [(1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)],
            {},
            "the number of query heads \\(3\\) must be a multiple of the number of key heads \\(2\\)",
        ),
        (
            [(1, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)],
            {},
            "the shapes of query, key and value do not match; as",
        ),
        (
            [(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)],
            {},
            "the shapes of query, key and value do not match; as",
        ),
        ([(4, 1, 16)] * 3, {"layout": "SBH"}, "requires num_heads to be a divisor of 16, but got None"),
        (
            [(4, 1, 16)] * 3,
            {"layout": "SBH", "num_heads": 3},
            "requires num_heads to be a divisor of 16, but got 3",
        ),
        (
            [(4, 2, 8)] * 3,
            {"layout": "TND"},
            "layout TND requires the argument packed, which gives the lengths of the sequences",
        ),
    ],
)
def test_bad_shapes(device, shapes, options, message):
    tensors = [torch.randn(s, device=device) for s in shapes]
    with pytest.raises(ValueError, match=message):
        attention(*tensors, **{"layout": "BNSD", "scale": 1.0, **options})


def test_mixed_dtypes(device):
    x = torch.randn(1, 2, 4, 8, device=device)
    with pytest.raises(ValueError, match="must have the same dtype"):
        attention(x, x.bfloat16(), x, layout="BNSD", scale=1.0)
