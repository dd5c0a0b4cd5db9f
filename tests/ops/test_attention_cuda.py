"""What can be known of CUDA's attention without a GPU: the kernel chosen, and what it is told is visible."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from megatron_npu.ops.attention import PackedSequences, attention, cuda, reference
from megatron_npu.ops.attention.cuda import Kernel, choose
from megatron_npu.ops.attention.spec import AttentionSpec, dense_segments, packed_segments
from tests.ops.attention_formula import formula, packed_formula, visible
from tests.support.tolerances import assert_near


def choice(
    flash_attn,
    queries=8,
    keys=8,
    *,
    cudnn=False,
    size=64,
    value_size=64,
    dtype=torch.bfloat16,
    causal=False,
    window=(None, None),
    offset=0,
    packed=None,
    mask=None,
    dropout_p=0.0,
):
    if packed is None:
        layout, segments = "BNSD", dense_segments(queries, keys, causal, window, offset)
        shapes = [(1, 4, queries, size), (1, 4, keys, size), (1, 4, keys, value_size)]
    else:
        layout, segments = "TND", packed_segments(packed, causal, window, offset)
        shapes = [(sum(packed.query_lengths), 4, size), *[(sum(packed.key_lengths), 4, size)] * 2]
    tensors = [torch.empty(s, dtype=dtype, device="meta") for s in shapes]
    spec = AttentionSpec(layout, 4, 4, 1.0, segments, packed is not None, mask is not None, dropout_p)
    return choose(*(t.shape for t in tensors), dtype, spec, flash_attn, cudnn)


MASK = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
PACKED = PackedSequences((3, 5), (3, 5))


@pytest.mark.parametrize(
    ("case", "with_flash_attn", "without"),
    [
        ({}, Kernel.FLASH_ATTN, Kernel.SDPA),
        ({"causal": True}, Kernel.FLASH_ATTN, Kernel.SDPA),
        ({"causal": True, "dropout_p": 0.1}, Kernel.FLASH_ATTN, Kernel.SDPA),
        ({"causal": True, "dtype": torch.float32}, Kernel.SDPA, Kernel.SDPA),
        ({"causal": True, "value_size": 32}, Kernel.SDPA, Kernel.SDPA),
        ({"queries": 1, "causal": True, "offset": "end"}, Kernel.FLASH_ATTN, Kernel.SDPA),
        ({"queries": 4, "causal": True}, Kernel.SDPA, Kernel.SDPA),  # flash-attn is causal from the end
        ({"queries": 4, "causal": True, "offset": "end"}, Kernel.FLASH_ATTN, Kernel.FLEX),
        ({"mask": MASK, "causal": True}, Kernel.SDPA, Kernel.SDPA),
        ({"causal": True, "window": (2, 0)}, Kernel.FLASH_ATTN, Kernel.FLEX),
        ({"causal": True, "window": (2, 0), "dtype": torch.float32}, Kernel.FLEX, Kernel.FLEX),
        ({"packed": PACKED, "causal": True}, Kernel.FLASH_ATTN, Kernel.FLEX),
        (
            {"packed": PACKED, "dropout_p": 0.1},
            Kernel.FLASH_ATTN,
            "dropout with a window or packed sequences",
        ),
        ({"window": (2, 0), "size": 40, "value_size": 40}, Kernel.FLASH_ATTN, "head sizes 40 and 40"),
    ],
    ids=str,
)
def test_choice(case, with_flash_attn, without):
    assert choice(True, **case).kernel is with_flash_attn
    actual = choice(False, **case)
    assert without in actual.reason if isinstance(without, str) else actual.kernel is without


LONG = {"queries": 256, "keys": 256}


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        ({**LONG, "causal": True}, Kernel.CUDNN),
        ({**LONG, "causal": True, "dropout_p": 0.1}, Kernel.CUDNN),
        ({"queries": 256, "keys": 512}, Kernel.CUDNN),
        ({"queries": 256, "keys": 512, "causal": True}, Kernel.SDPA),  # of which triangle, kernels differ
        ({**LONG, "causal": True, "dtype": torch.float32}, Kernel.SDPA),
        ({**LONG, "causal": True, "value_size": 32}, Kernel.SDPA),
        ({**LONG, "causal": True, "size": 256, "value_size": 256}, Kernel.SDPA),
        ({**LONG, "causal": True, "window": (2, 0)}, Kernel.FLEX),
        ({"queries": 300, "keys": 300, "causal": True}, Kernel.SDPA),  # a plan for each length is slow
        ({"causal": True}, Kernel.SDPA),
    ],
    ids=str,
)
def test_choice_with_cudnn(case, kernel):
    assert choice(False, cudnn=True, **case).kernel is kernel
    if kernel is Kernel.CUDNN:
        assert choice(True, cudnn=True, **case).kernel is kernel
        assert choice(True, **case).kernel is Kernel.FLASH_ATTN


def test_cudnn_is_not_asked_for_where_gradients_must_repeat(monkeypatch):
    monkeypatch.setattr(cuda, "_has_cudnn", lambda: True)
    query = torch.empty(1, 4, 256, 64, dtype=torch.bfloat16, device="meta")
    segments = dense_segments(256, 256, True, (None, None), 0)
    spec = AttentionSpec("BNSD", 4, 4, 1.0, segments, False, False, 0.0)
    assert cuda.plan_call(query, query, query, spec, None).kernel is Kernel.CUDNN
    torch.use_deterministic_algorithms(True)
    try:
        assert cuda.plan_call(query, query, query, spec, None).kernel is not Kernel.CUDNN
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_order_of_torchs_kernels_is_put_back(monkeypatch):
    """Inside it is cuDNN's first; where torch says that this cuDNN does not take the call, it stays."""
    monkeypatch.setattr(cuda, "_has_cudnn", lambda: True)
    before, seen = torch._C._get_sdp_priority_order(), []

    def sdpa(query, *_):
        seen.append(torch._C._get_sdp_priority_order())
        return query

    monkeypatch.setattr(cuda, "_sdpa", sdpa)
    reference.operation.bind("cuda")
    query = torch.ones(1, 4, 256, 64, dtype=torch.bfloat16)
    for takes in (True, False):
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _, takes=takes: takes)
        attention(query, query, query, layout="BNSD", scale=1.0, causal=True)
    reference.operation.bind("cpu")
    assert [order[0] for order in seen] == [3, before[0]]
    assert torch._C._get_sdp_priority_order() == before


@pytest.fixture
def cuda_on_the_host(monkeypatch):
    """CUDA's implementation on tensors of the host; FlexAttention as torch wrote it, not compiled."""
    reference.operation.bind("cuda")
    monkeypatch.setattr(cuda, "_flash_attn_installed", lambda: False)
    monkeypatch.setattr(cuda, "_compiled", lambda name: getattr(flex_attention, name))
    yield
    reference.operation.bind("cpu")
    cuda._block_mask.cache_clear()


QUICK = settings(max_examples=25)
limits = st.none() | st.integers(0, 12)


@QUICK
@given(
    queries=st.integers(1, 12),
    keys=st.integers(1, 12),
    causal=st.booleans(),
    window=st.tuples(limits, limits),
    offset=st.sampled_from([0, 3, -2, "end"]),
    groups=st.sampled_from([(2, 2), (4, 2)]),
)
def test_sdpa_and_flex_see_what_the_case_says(
    cuda_on_the_host, queries, keys, causal, window, offset, groups
):
    """Forward only: FlexAttention has no backward on the host."""
    torch.manual_seed(0)
    shapes = [(2, groups[0], queries, 16), (2, groups[1], keys, 16), (2, groups[1], keys, 16)]
    tensors = [torch.randn(s) for s in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        call = {"causal": causal, "window": window, "offset": offset}
        actual = attention(*tensors, layout="BNSD", scale=0.3, **call)
    pairs = visible(queries, keys, causal, window, keys - queries if offset == "end" else offset)
    assert_near(actual, formula(*(t.double() for t in tensors), 0.3, pairs), torch.float32)


def test_flex_sees_packed_sequences(cuda_on_the_host):
    packed = PackedSequences((3, 0, 7, 5), (4, 2, 7, 9))
    tensors = [torch.randn(t, 2, 16) for t in (15, 22, 22)]
    call = {"causal": True, "window": (2, None), "offset": "end"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = attention(*tensors, layout="TND", packed=packed, scale=0.3, **call)
    assert_near(actual, packed_formula(*(t.double() for t in tensors), 0.3, packed, **call), torch.float32)


def test_masked_rows_are_zero_with_zero_gradients(cuda_on_the_host):
    mask = torch.rand(2, 1, 6, 6) < 0.4
    mask[:, :, 2] = True
    leaves = [torch.randn(2, 2, 6, 16, requires_grad=True) for _ in range(3)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    actual = attention(*leaves, layout="BNSD", scale=0.3, mask=mask, causal=True)
    expected = formula(*doubles, 0.3, visible(6, 6, True, (None, None), 0) & ~mask)
    assert_near(actual, expected, torch.float32)
    for left, right in zip(
        torch.autograd.grad(actual.sum(), leaves),
        torch.autograd.grad(expected.sum(), doubles),
        strict=True,
    ):
        assert_near(left, right, torch.float32)


def documented_flash_attn():
    """Return what flash-attn documents: windows counted with the last query at the last key, -1 open.

    Its list ``told`` says for each call whether it was to be deterministic.
    """
    told = []

    def dense(query, key, value, *, dropout_p, softmax_scale, window_size, deterministic):
        assert dropout_p == 0.0
        told.append(deterministic)
        query, key, value = (t.transpose(1, 2).double() for t in (query, key, value))
        queries, keys = query.size(2), key.size(2)
        window = tuple(None if limit == -1 else limit for limit in window_size)
        pairs = visible(queries, keys, False, window, keys - queries)
        return formula(query, key, value, softmax_scale, pairs).transpose(1, 2).bfloat16()

    def variable(query, key, value, ends, key_ends, longest, longest_key, **options):
        parts = []
        for i in range(len(ends) - 1):
            q, k = slice(ends[i], ends[i + 1]), slice(key_ends[i], key_ends[i + 1])
            assert q.stop - q.start <= longest
            assert k.stop - k.start <= longest_key
            parts.append(dense(query[q][None], key[k][None], value[k][None], **options)[0])
        return torch.cat(parts)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func, module.told = dense, variable, told
    return module


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (3, 0)},
        {"window": (3, 2)},
        {"packed": PACKED, "causal": True, "window": (1, None)},
        {"packed": PackedSequences((3, 5), (4, 9)), "causal": True, "offset": "end"},
    ],
    ids=str,
)
def test_what_flash_attn_is_told(cuda_on_the_host, monkeypatch, call):
    monkeypatch.setattr(cuda, "_flash_attn_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", documented_flash_attn())
    packed = call.get("packed")
    if packed:
        tensors = [
            torch.randn(sum(n), 2, 16).bfloat16()
            for n in (packed.query_lengths, packed.key_lengths, packed.key_lengths)
        ]
    else:
        tensors = [torch.randn(8, 2, 2, 16).bfloat16() for _ in range(3)]
    actual = attention(*tensors, layout="TND" if packed else "SBND", scale=0.3, **call)
    doubles = [t.double() for t in tensors]
    if packed:
        call = {"causal": False, "window": (None, None), "offset": 0, **call}
        expected = packed_formula(*doubles, 0.3, **call)
    else:
        pairs = visible(8, 8, call.get("causal", False), call.get("window", (None, None)), 0)
        expected = formula(*(t.permute(1, 2, 0, 3) for t in doubles), 0.3, pairs).permute(2, 0, 1, 3)
    assert_near(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("packed", [None, PACKED])
def test_flash_attn_is_deterministic_when_torch_is_to_be(cuda_on_the_host, monkeypatch, asked, packed):
    flash_attn = documented_flash_attn()
    monkeypatch.setattr(cuda, "_flash_attn_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    tensors = [torch.randn((8, 2, 16) if packed else (8, 1, 2, 16)).bfloat16() for _ in range(3)]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked)
    try:
        attention(*tensors, layout="TND" if packed else "SBND", scale=0.3, causal=True, packed=packed)
    finally:
        torch.use_deterministic_algorithms(before)
    assert set(flash_attn.told) == {asked}
