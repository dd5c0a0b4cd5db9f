"""From a case of attention to the arguments of npu_fusion_attention: needs no NPU.

What a sparse mode makes visible is written down here once more, from torch_npu's documentation.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_npu.ops.attention import PackedSequences, npu
from megatron_npu.ops.attention.npu import UNLIMITED, NpuCall
from megatron_npu.ops.attention.spec import AttentionSpec, dense_segments, packed_segments
from megatron_npu.ops.dispatch import Unsupported
from tests.ops.attention_formula import visible


def call_for(
    queries=8,
    keys=None,
    *,
    heads=4,
    key_heads=4,
    batch=2,
    size=16,
    value_size=None,
    dtype=torch.bfloat16,
    layout="SBND",
    causal=False,
    window=(None, None),
    offset=0,
    mask=None,
    packed=None,
    dropout_p=0.0,
):
    """Return npu_call's answer for tensors that have shapes only."""
    if packed is None:
        keys = queries if keys is None else keys
        segments = dense_segments(queries, keys, causal, window, offset)
        shapes = [(queries, batch, heads, size), (keys, batch, key_heads, size)]
        value = (keys, batch, key_heads, value_size or size)
    else:
        layout, segments = "TND", packed_segments(packed, causal, window, offset)
        shapes = [(sum(packed.query_lengths), heads, size), (sum(packed.key_lengths), key_heads, size)]
        value = shapes[1]
    tensors = [torch.empty(s, dtype=dtype, device="meta") for s in (*shapes, value)]
    spec = AttentionSpec(
        layout, heads, key_heads, 0.25, segments, packed is not None, mask is not None, dropout_p
    )
    return npu.plan_call(*tensors, spec, mask)


@pytest.mark.parametrize(
    ("case", "mode", "pre", "after"),
    [
        ({}, 0, UNLIMITED, UNLIMITED),
        ({"causal": True}, 2, UNLIMITED, UNLIMITED),
        ({"queries": 4, "keys": 9, "causal": True, "offset": "end"}, 3, UNLIMITED, UNLIMITED),
        ({"queries": 4, "keys": 9, "causal": True, "offset": 2}, 4, UNLIMITED, -3),
        ({"queries": 9000, "causal": True, "window": (2048, 0)}, 4, 2048, 0),
        ({"queries": 8192, "causal": True, "window": (65536, 65536)}, 2, UNLIMITED, UNLIMITED),
        ({"queries": 8192, "window": (65536, 65536)}, 0, UNLIMITED, UNLIMITED),
        ({"window": (2, 3)}, 4, 2, 3),
        ({"queries": 1, "keys": 9, "causal": True, "offset": "end"}, 0, UNLIMITED, UNLIMITED),
        ({"mask": torch.zeros(1, 1, 8, 8, dtype=torch.bool), "causal": True}, 1, UNLIMITED, UNLIMITED),
        ({"packed": PackedSequences((3, 5), (3, 5))}, 0, UNLIMITED, UNLIMITED),
        ({"packed": PackedSequences((3, 5), (3, 5)), "causal": True}, 2, UNLIMITED, UNLIMITED),
        (
            {"packed": PackedSequences((3, 5), (4, 9)), "causal": True, "offset": "end"},
            3,
            UNLIMITED,
            UNLIMITED,
        ),
        ({"packed": PackedSequences((3, 5), (3, 5)), "causal": True, "window": (1, None)}, 4, 1, 0),
    ],
    ids=str,
)
def test_table(case, mode, pre, after):
    call = call_for(**case)
    assert isinstance(call, NpuCall), call
    assert (call.sparse_mode, call.pre_tockens, call.next_tockens) == (mode, pre, after)


@settings(max_examples=150)
@given(
    queries=st.integers(1, 12),
    keys=st.integers(1, 12),
    causal=st.booleans(),
    window=st.tuples(st.none() | st.integers(0, 14), st.none() | st.integers(0, 14)),
    offset=st.sampled_from([0, 3, -2, "end"]),
)
def test_modes_mean_what_the_case_means(queries, keys, causal, window, offset):
    call = call_for(queries, keys, causal=causal, window=window, offset=offset)
    if isinstance(call, Unsupported):
        assume(False)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    end = i + keys - queries  # where the band of mode 4 and the triangle of mode 3 are drawn from
    seen = {
        0: torch.ones(queries, keys, dtype=torch.bool),
        2: j <= i,
        3: j <= end,
        4: (j <= end + call.next_tockens) & (j >= end - call.pre_tockens),
    }[call.sparse_mode]
    expected = visible(queries, keys, causal, window, keys - queries if offset == "end" else offset)
    assert torch.equal(seen, expected)
    assert call.inner_precise == (0 if expected.any(1).all() else 2)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"dtype": torch.float64}, "does not support torch.float64"),
        ({"value_size": 8}, "keys and values must have the same shape, but got"),
        (
            {"heads": 257, "key_heads": 257},
            "number of heads 257 is outside the supported range from 1 to 256",
        ),
        ({"size": 769}, "head size 769 is outside the supported range from 1 to 768"),
        ({"queries": (1 << 20) + 1}, "number of queries 1048577"),
        ({"packed": PackedSequences((1,) * 1025, (1,) * 1025)}, "1025 packed sequences"),
        ({"packed": PackedSequences((4,), (2,)), "causal": True, "offset": "end"}, "see no key"),
        ({"packed": PackedSequences((4, 4), (4, 6)), "window": (1, 1)}, "end at different offsets"),
        ({"queries": 4, "keys": 4, "window": (0, 0), "offset": 9}, "a band of -9 tokens before"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(case, reason):
    assert reason in call_for(**case).reason


def test_arguments():
    call = call_for(8, 10, heads=6, key_heads=2, dropout_p=0.25, causal=True)
    assert call == NpuCall("SBH", 6, 0.25, 0.75, sparse_mode=2)
    packed = call_for(packed=PackedSequences((3, 0, 0, 5), (3, 0, 2, 5)), causal=True)
    assert packed.input_layout == "TND"
    assert packed.cu_seqlens == ((3, 3, 8), (3, 5, 10))  # ends; an empty sequence is left out


def test_a_call_is_decided_once_and_its_mask_is_not_kept():
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    first, second = (call_for(mask=mask.clone()) for _ in range(2))
    assert first is second
    alive = weakref.ref(mask)
    assert call_for(mask=mask) is first
    del mask
    gc.collect()
    assert alive() is None


def mask_for(tensors, spec, mask=None):
    """Return the atten_mask that the call of ``spec`` is given."""
    return npu.atten_mask(npu.plan_call(*tensors, spec, mask), tensors[0], spec, mask)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 1, 8, 9), (8, 9)),
        ((1, 1, 1, 9), (8, 9)),
        ((2, 1, 1, 9), (2, 1, 8, 9)),
        ((1, 4, 8, 9), (2, 4, 8, 9)),
    ],
)
def test_masks_have_a_documented_shape(shape, expected):
    mask = torch.rand(shape) < 0.5
    segments = dense_segments(8, 9, True, (None, None), 1)
    spec = AttentionSpec("BNSD", 4, 4, 1.0, segments, masked=True)
    tensors = [torch.empty(2, 4, n, 16) for n in (8, 9, 9)]
    full = mask_for(tensors, spec, mask)
    assert full.shape == expected
    assert torch.equal(
        full.expand(2, 4, 8, 9), ~visible(8, 9, True, (None, None), 1) | mask.expand(2, 4, 8, 9)
    )


def test_a_mask_is_expanded_once_per_batch():
    mask = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    tensors = [torch.empty(2, 4, n, 16) for n in (8, 9, 9)]
    spec = AttentionSpec("BNSD", 4, 4, 1.0, dense_segments(8, 9, False, (None, None), 0), masked=True)
    first, second = (mask_for(tensors, spec, mask) for _ in range(2))
    assert first is second
    mask[0, ..., 3] = True  # the buffer is used again, for another batch
    third = mask_for(tensors, spec, mask)
    assert third[0, 0, :, 3].all()
    assert not first.any()


def test_one_compressed_mask_per_device():
    """Never [b, 1, s, s]: the same 2048 × 2048 triangle for every length, batch and layer."""
    masks = set()
    for length in (100, 5000):
        tensors = [torch.empty(1, 1, length, 8)] * 3
        for window in ((None, None), (50, 0)):
            spec = AttentionSpec("BNSD", 1, 1, 1.0, dense_segments(length, length, True, window, 0))
            mask = mask_for(tensors, spec)
            masks.add(mask.data_ptr())
            assert mask.shape == (2048, 2048)
    assert len(masks) == 1
    assert torch.equal(mask, torch.ones(2048, 2048).triu(1).bool())


def test_thirds_of_a_joint_projection_are_brought_apart_in_one_copy():
    joint = torch.randn(5, 2, 3, 12, requires_grad=True)
    thirds = joint.split(4, -1)
    apart = npu._contiguous_qkv(*thirds)
    assert len({tensor.untyped_storage().data_ptr() for tensor in apart}) == 1
    for whole, third in zip(apart, thirds, strict=True):
        assert whole.is_contiguous()
        assert torch.equal(whole, third)
    grads = [torch.randn(5, 2, 3, 4) for _ in range(3)]
    (found,) = torch.autograd.grad(apart, joint, grads)
    assert torch.equal(found, torch.cat(grads, -1))


@pytest.mark.parametrize("others", [(0, 0), (0, 2), (2, 1), (1, None)], ids=str)
def test_tensors_that_lie_otherwise_are_left_alone(others):
    query, *rest = torch.randn(5, 2, 3, 12).split(4, -1)
    thirds = [query, *rest]
    key, value = (torch.randn(5, 2, 3, 4) if number is None else thirds[number] for number in others)
    assert all(
        a is b for a, b in zip(npu._contiguous_qkv(query, key, value), (query, key, value), strict=True)
    )
