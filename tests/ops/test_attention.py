"""ops.attention against the formula in fp64: output and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_npu.ops.attention import attention
from tests.ops.tolerances import assert_near

RELAXED = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def formula(query, key, value, scale, causal=False, window=(None, None), offset=0, mask=None):
    """[b, n, s, d] in fp64, one query and one key at a time as far as visibility goes."""
    queries, keys = query.size(2), key.size(2)
    visible = torch.ones(query.size(0), 1, queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            position = offset + i
            hidden = causal and j > position
            hidden |= window[0] is not None and j < position - window[0]
            hidden |= window[1] is not None and j > position + window[1]
            visible[:, :, i, j] = not hidden
    if mask is not None:
        visible = visible & ~mask.cpu()
    visible = visible.to(query.device)
    repeat = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(repeat, 1) for t in (key, value))
    scores = torch.einsum("bnid,bnjd->bnij", query, key) * scale
    weights = torch.where(visible, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    return torch.einsum("bnij,bnjd->bnid", weights, value)


def leaves(dtype, device, *shapes):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def check(dtype, device, shapes, layout="BNSD", **call):
    torch.manual_seed(0)
    order = {"BNSD": (0, 1, 2, 3), "SBND": (2, 0, 1, 3), "BSND": (0, 2, 1, 3)}[layout]
    tensors = leaves(dtype, device, *shapes)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    expected = formula(*doubles, scale=0.3, **call)
    permuted = [t.permute(order) for t in tensors]
    back = [order.index(i) for i in range(4)]
    actual = attention(*permuted, layout=layout, scale=0.3, **call).permute(back)
    assert actual.dtype is dtype
    assert_near(actual, expected, dtype)
    grad = torch.randn(expected.shape, device=device).to(dtype)
    gradients = torch.autograd.grad(actual, tensors, grad)
    for name, ours, right in zip(
        "qkv", gradients, torch.autograd.grad(expected, doubles, grad.double()), strict=True
    ):
        assert_near(ours, right, dtype, f"gradient of {name}")


sizes = st.integers(1, 19)
limits = st.none() | st.integers(0, 25)


@RELAXED
@given(
    data=st.data(),
    queries=sizes,
    batch=st.integers(1, 3),
    groups=st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]),
    layout=st.sampled_from(["BNSD", "SBND", "BSND"]),
    causal=st.booleans(),
    window=st.tuples(limits, limits),
)
def test_self_attention(device, dtype, data, queries, batch, groups, layout, causal, window):
    heads, kv = groups
    shapes = [(batch, heads, queries, 8)] + [(batch, kv, queries, 8)] * 2
    check(dtype, device, shapes, layout, causal=causal, window=window)


@RELAXED
@given(queries=sizes, more=sizes, causal=st.booleans(), window=st.tuples(limits, limits))
def test_more_keys_than_queries(device, dtype, queries, more, causal, window):
    """Decoding with cached keys: the last query stands at the last key."""
    shapes = [(2, 2, queries, 8)] + [(2, 2, queries + more, 8)] * 2
    check(dtype, device, shapes, causal=causal, window=window, offset=more)


@RELAXED
@given(queries=sizes, keys=sizes, seed=st.integers(0, 9))
def test_arbitrary_mask(device, dtype, queries, keys, seed):
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.4
    check(dtype, device, [(2, 2, queries, 8)] + [(2, 2, keys, 8)] * 2, mask=mask.to(device))


@pytest.mark.parametrize("layout", ["SBH", "BSH"])
def test_headless_layouts(device, layout):
    torch.manual_seed(0)
    four = torch.randn(3, 6, 5, 2, 8, device=device)  # q, k, v of [s, b, n, d]
    expected = attention(*four, layout="SBND", scale=0.3, causal=True).flatten(2)
    flat = four.flatten(3) if layout == "SBH" else four.flatten(3).transpose(1, 2)
    actual = attention(*flat, layout=layout, num_heads=2, scale=0.3, causal=True)
    actual = actual if layout == "SBH" else actual.transpose(0, 1)
    torch.testing.assert_close(actual, expected)


def test_dropout_is_reproducible_and_unbiased(device):
    torch.manual_seed(0)
    query = torch.randn(2, 4, 64, 16, device=device)
    value = torch.ones_like(query)

    def draw(seed):
        torch.manual_seed(seed)
        return attention(query, query, value, layout="BNSD", scale=0.25, dropout_p=0.25)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    mean = torch.stack([draw(seed) for seed in range(40)]).mean()
    assert abs(mean.item() - 1.0) < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "SBH"}, "num_heads"),
        ({"layout": "XYZ"}, "layout must be one of"),
    ],
)
def test_bad_calls(device, change, message):
    x = torch.randn(2, 2, 4, 8, device=device)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, **{"layout": "BNSD", "scale": 1.0, **change})


def test_heads_that_do_not_divide(device):
    with pytest.raises(ValueError, match="2 key heads do not divide 3"):
        attention(*(torch.randn(1, n, 4, 8, device=device) for n in (3, 2, 2)), layout="BNSD", scale=1.0)
