"""Flash attention on the simulated NPU against softmax(scale · q·kᵀ + mask) · v in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.sim.against_fp64 import DTYPES, compare
from tests.support.tolerances import assert_near

pytestmark = pytest.mark.simulated

SCALE = 0.3
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
DENSE = ["SBH", "BSH", "BSND", "BNSD"]


def expected(query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, **more: Tensor) -> Tensor:
    """Attention over ``[b, n, s, d]`` by the textbook; ``bias`` is added to scores, ``weights`` multiply."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = SCALE * torch.einsum("bnqd,bnkd->bnqk", query, key) + more.get("bias", 0.0)
    if masked is not None:
        scores = scores.masked_fill(masked, -1e30)
    if "sink" in more:
        sink = more["sink"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    if masked is not None:  # a query that sees nothing
        probabilities = probabilities.masked_fill(masked.expand_as(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bnqk,bnkd->bnqd", probabilities * more.get("factors", 1.0), value)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return ``[b, n, s, d]`` in another layout."""
    axes = {"BNSD": "b n s d", "BSND": "b s n d", "BSH": "b s n d", "SBH": "s b n d"}[layout].split()
    moved = x.permute(*("bnsd".index(axis) for axis in axes))
    return (moved.flatten(2) if layout.endswith("H") else moved).contiguous()


def positions(queries: int, keys: int, anchor: int) -> Tensor:
    """Return how far key j lies ahead of query i, which stands at i + anchor."""
    return torch.tensor([[j - (i + anchor) for j in range(keys)] for i in range(queries)])


def mode_case(mode: str, batch: int, heads: int, queries: int, keys: int) -> tuple[Tensor | None, dict]:
    """Return which pairs are masked and the arguments that say so."""
    corner = keys - queries
    full = torch.rand(batch, heads, queries, keys) > 0.6
    full[..., 0] = False
    if mode == "no mask":
        return None, {}
    if mode == "0, B1SS":
        return full[:, :1], {"atten_mask": full[:, :1]}
    if mode == "0, band":
        ahead = positions(queries, keys, 0)
        masked = (ahead > 1) | (ahead < -2)
        return masked, {"atten_mask": masked, "pre_tockens": 2, "next_tockens": 1}
    if mode == "1, BNSS":
        return full, {"atten_mask": full, "sparse_mode": 1}
    if mode == "1, SS, uint8":
        return full[0, 0], {"atten_mask": full[0, 0].to(torch.uint8), "sparse_mode": 1}
    if mode == "2":
        return positions(queries, keys, 0) > 0, {"atten_mask": TRIANGLE, "sparse_mode": 2}
    if mode == "3":
        return positions(queries, keys, corner) > 0, {"atten_mask": TRIANGLE, "sparse_mode": 3}
    ahead = positions(queries, keys, corner)
    band = {"pre_tockens": 3, "next_tockens": 1}
    return (ahead > 1) | (ahead < -3), {"atten_mask": TRIANGLE, "sparse_mode": 4, **band}


MODES = ["no mask", "0, B1SS", "0, band", "1, BNSS", "1, SS, uint8", "2", "3", "4"]


def npu_attention(heads: int, layout: str, name: str = "npu_fusion_attention", **arguments: object):
    """Return the operation on ``[b, n, s, d]`` tensors, laid out for the call and back."""
    import torch_npu

    arguments = {k: v.npu() if isinstance(v, Tensor) else v for k, v in arguments.items()}

    def operation(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inputs = [laid_out(x, layout) for x in (query, key, value)]
        result = getattr(torch_npu, name)(*inputs, heads, layout, scale=SCALE, **arguments)[0]
        if layout.endswith("H"):
            result = result.unflatten(-1, (heads, -1))
        order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}[layout]
        return result.permute(order)

    return operation


def triple(batch: int, heads: int, kv_heads: int, queries: int, keys: int, size: int, value_size: int = 0):
    """Return random query, key and value ``[b, n, s, d]``."""
    shapes = [(heads, queries, size), (kv_heads, keys, size), (kv_heads, keys, value_size or size)]
    return [torch.randn(batch, *shape) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", DENSE)
def test_dense_layouts(layout, mode, dtype):
    for heads, kv_heads, queries, keys in ((4, 4, 6, 6), (4, 2, 5, 8), (4, 1, 7, 4)):
        if keys < queries and mode == "4":
            continue  # a band of the bottom right corner that leaves queries without keys is not the point
        masked, arguments = mode_case(mode, 2, heads, queries, keys)
        compare(
            npu_attention(heads, layout, **arguments),
            lambda q, k, v, masked=masked: expected(q, k, v, masked),
            triple(2, heads, kv_heads, queries, keys, 8),
            dtype,
        )


@settings(max_examples=25)
@given(
    st.sampled_from(DENSE),
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (6, 3), (8, 8)]),
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(1, 12),
)
def test_any_shape(layout, mode, batch, heads, queries, more_keys, size):
    masked, arguments = mode_case(mode, batch, heads[0], queries, queries + more_keys)
    compare(
        npu_attention(heads[0], layout, **arguments),
        lambda q, k, v: expected(q, k, v, masked),
        triple(batch, *heads, queries, queries + more_keys, size),
        torch.float32,
    )


@pytest.mark.parametrize("layout", DENSE)
def test_values_may_be_narrower_than_keys(layout):
    inputs = triple(2, 4, 2, 5, 6, 8, value_size=4)
    compare(npu_attention(4, layout), lambda q, k, v: expected(q, k, v, None), inputs, torch.float32)


def test_lower_case_layouts_are_taken():
    import torch_npu

    x = torch.randn(1, 2, 4, 8).npu()
    upper, lower = (torch_npu.npu_fusion_attention(x, x, x, 2, layout)[0] for layout in ("BNSD", "bnsd"))
    assert torch.equal(upper.cpu(), lower.cpu())


@pytest.mark.parametrize("mode", [5, 6])
@pytest.mark.parametrize(("queries", "keys", "prefix"), [(6, 6, [0, 4]), (4, 7, [3, 6]), (7, 4, [0, 2])])
def test_prefixes(mode, queries, keys, prefix):
    later = positions(queries, keys, keys - queries) > 0
    masked = torch.stack([later & (torch.arange(keys) >= n) for n in prefix]).unsqueeze(1)
    rectangle = (torch.arange(2048) >= 1024).expand(1024, 2048)
    mask = masked if mode == 5 else torch.cat([TRIANGLE, rectangle])
    compare(
        npu_attention(2, "BNSD", sparse_mode=mode, atten_mask=mask, prefix=prefix),
        lambda q, k, v: expected(q, k, v, masked),
        triple(2, 2, 1, queries, keys, 8),
        torch.float32,
    )


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (2, 4, 1, 6), (1, 4, 5, 6)])
@pytest.mark.parametrize(
    ("name", "arguments", "factor"),
    [
        ("npu_fusion_attention", {}, SCALE),  # added to q·kᵀ before the scale
        ("npu_fusion_attention_v2", {}, SCALE),
        ("npu_fusion_attention_v2", {"pse_type": 0}, 1.0),  # after it
    ],
)
def test_position_bias_and_its_gradient(name, arguments, factor, shape):
    import torch_npu

    def operation(query, key, value, bias):
        call = getattr(torch_npu, name)
        return call(query, key, value, 4, "BNSD", pse=bias, scale=SCALE, **arguments)[0]

    inputs = [*triple(2, 4, 2, 5, 6, 8), torch.randn(shape)]
    formula = lambda q, k, v, bias: expected(q, k, v, None, bias=factor * bias)  # noqa: E731
    compare(operation, formula, inputs, torch.float32)


@pytest.mark.parametrize(
    "name", ["npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"]
)
def test_sink_and_its_gradient(name):
    import torch_npu

    def operation(query, key, value, sink):
        return getattr(torch_npu, name)(query, key, value, 4, "BNSD", scale=SCALE, sink=sink)[0]

    inputs = [*triple(2, 4, 2, 5, 6, 8), torch.randn(4)]
    compare(operation, lambda q, k, v, sink: expected(q, k, v, None, sink=sink), inputs, torch.float32)


@pytest.mark.parametrize("name", ["npu_fusion_attention_v2", "npu_fusion_attention_v3"])
@pytest.mark.parametrize("mode", ["no mask", "2", "3"])
def test_the_other_versions(name, mode):
    masked, arguments = mode_case(mode, 2, 4, 5, 6)
    compare(
        npu_attention(4, "SBH", name, **arguments),
        lambda q, k, v: expected(q, k, v, masked),
        triple(2, 4, 2, 5, 6, 8),
        torch.bfloat16,
    )


def test_the_band_of_the_second_version():
    ahead = positions(5, 6, 1)
    band = {"pre_tokens": 2, "next_tokens": 0, "atten_mask": TRIANGLE, "sparse_mode": 4}
    compare(
        npu_attention(4, "BSND", "npu_fusion_attention_v2", **band),
        lambda q, k, v: expected(q, k, v, (ahead > 0) | (ahead < -2)),
        triple(2, 4, 2, 5, 6, 8),
        torch.float32,
    )


# --- TND: sequences of several lengths joined ---

LENGTHS = [(5, 5), (3, 7), (1, 2), (6, 6)]


def ends(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def joined(parts: list[Tensor]) -> Tensor:
    """Return ``[1, n, s, d]`` tensors as one ``[t, n, d]``."""
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def by_sequence(masked_of, lengths=LENGTHS):
    """Return the formula on ``[t, n, d]``: attention within each sequence, less ``masked_of(sq, skv)``."""
    queries, keys = (list(each) for each in zip(*lengths, strict=True))

    def formula(query, key, value):
        parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
        blocks = [[x.transpose(0, 1).unsqueeze(0) for x in part] for part in parts]
        return joined([expected(*b, masked_of(b[0].size(2), b[1].size(2))) for b in blocks])

    return formula


TND_MODES = {
    "no mask": (lambda q, k: None, {}),
    "0": (lambda q, k: positions(q, k, 0).abs() > 2, "band"),
    "1": (lambda q, k: positions(q, k, 0) > 1, "full"),
    "2": (lambda q, k: positions(q, k, 0) > 0, {"sparse_mode": 2, "atten_mask": TRIANGLE}),
    "3": (lambda q, k: positions(q, k, k - q) > 0, {"sparse_mode": 3, "atten_mask": TRIANGLE}),
    "4": (
        lambda q, k: (positions(q, k, k - q) > 0) | (positions(q, k, k - q) < -2),
        {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": 2, "next_tockens": 0},
    ),
}


def tnd_arguments(mode: str) -> dict:
    masked_of, arguments = TND_MODES[mode]
    largest = [max(each) for each in zip(*LENGTHS, strict=True)]
    if arguments == "band":
        return {"atten_mask": masked_of(*largest), "pre_tockens": 2, "next_tockens": 2}
    if arguments == "full":
        return {"atten_mask": masked_of(*largest), "sparse_mode": 1}
    return arguments


def npu_joined(heads: int, lengths=LENGTHS, **arguments: object):
    """Return the operation on ``[t, n, d]``."""
    import torch_npu

    arguments = {k: v.npu() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    query_ends, key_ends = (ends(list(each)) for each in zip(*lengths, strict=True))
    arguments = {"actual_seq_qlen": query_ends, "actual_seq_kvlen": key_ends, **arguments}
    return lambda q, k, v: torch_npu.npu_fusion_attention(q, k, v, heads, "TND", scale=SCALE, **arguments)[0]


def joined_inputs(heads=4, kv_heads=2, lengths=LENGTHS, size=8):
    queries, keys = (sum(each) for each in zip(*lengths, strict=True))
    return [torch.randn(queries, heads, size), *(torch.randn(keys, kv_heads, size) for _ in range(2))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softmax_layout", ["", "TND"])
@pytest.mark.parametrize("mode", TND_MODES)
def test_joined_sequences(mode, softmax_layout, dtype):
    operation = npu_joined(4, softmax_layout=softmax_layout, **tnd_arguments(mode))
    compare(operation, by_sequence(TND_MODES[mode][0]), joined_inputs(), dtype)


def test_joined_sequences_with_prefixes():
    prefix = [2, 5, 1, 0]
    rectangle = (torch.arange(2048) >= 1024).expand(1024, 2048)
    operation = npu_joined(4, sparse_mode=6, atten_mask=torch.cat([TRIANGLE, rectangle]), prefix=prefix)
    left = iter(prefix)

    def masked_of(queries, keys):
        return (positions(queries, keys, keys - queries) > 0) & (torch.arange(keys) >= next(left))

    compare(operation, by_sequence(masked_of), joined_inputs(), torch.float32)


def test_a_sequence_may_be_empty():
    lengths = [(3, 3), (0, 0), (4, 4)]
    operation = npu_joined(4, lengths, sparse_mode=3, atten_mask=TRIANGLE)
    full = [each for each in lengths if each != (0, 0)]
    formula = by_sequence(lambda q, k: positions(q, k, k - q) > 0, full)
    compare(operation, formula, joined_inputs(lengths=lengths), torch.float32)


def test_final_zeros_leave_sequences_out():
    query, key, value = (x.npu().requires_grad_() for x in joined_inputs())
    some = {"actual_seq_qlen": [5, 8, 0, 0], "actual_seq_kvlen": [5, 12, 0, 0]}
    result = npu_joined(4, **some)(query, key, value)
    whole = npu_joined(4)(query, key, value)
    assert torch.equal(result[:8].cpu(), whole[:8].cpu())
    assert not result[8:].any()
    result.sum().backward()
    assert not query.grad[8:].any()
    assert not key.grad[12:].any()


def test_statistics_of_a_dense_layout():
    import torch_npu

    query, key, value = triple(2, 4, 2, 5, 6, 8)
    _, maximum, total, *_ = torch_npu.npu_fusion_attention(
        query.npu(), key.npu(), value.npu(), 4, "BNSD", scale=SCALE
    )
    scores = SCALE * query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2)
    peak = scores.amax(-1, keepdim=True)
    assert_near(maximum.cpu(), peak.expand(-1, -1, -1, 8), torch.float32)
    assert_near(total.cpu(), (scores - peak).exp().sum(-1, keepdim=True).expand(-1, -1, -1, 8), torch.float32)


def test_statistics_of_joined_sequences_are_ordered_by_head_within_a_sequence():
    import torch_npu

    inputs = [x.npu() for x in joined_inputs()]
    query_ends, key_ends = (ends(list(each)) for each in zip(*LENGTHS, strict=True))
    by_head, by_token = (
        torch_npu.npu_fusion_attention(
            *inputs, 4, "TND", actual_seq_qlen=query_ends, actual_seq_kvlen=key_ends, softmax_layout=layout
        )[1].cpu()
        for layout in ("", "TND")
    )
    assert by_head.shape == by_token.shape == (15, 4, 8)
    for start, end in zip([0, *query_ends], query_ends, strict=False):
        assert torch.equal(by_head[start:end].reshape(4, -1, 8), by_token[start:end].transpose(0, 1))


# --- dropout ---


def factors_of(call, queries: int, keys: int) -> Tensor:
    """Recover the dropout factors from the output for uniform weights and the unit matrix as values."""
    zeros, unit = torch.zeros(1, 2, queries, keys), torch.eye(keys).expand(1, 2, keys, keys)
    return (
        call(zeros.npu(), torch.zeros(1, 2, keys, keys).npu(), unit.contiguous().npu())[0].detach().cpu()
        * keys
    )


@pytest.mark.parametrize(
    "name", ["npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"]
)
def test_dropout_is_exact_in_forward_and_backward(name):
    import torch_npu

    torch.npu.manual_seed(5)
    state = torch.npu.get_rng_state()

    def call(query, key, value):
        torch.npu.set_rng_state(state)
        return getattr(torch_npu, name)(query, key, value, 2, "BNSD", scale=SCALE, keep_prob=0.75)

    factors = factors_of(call, 12, 16)
    torch.testing.assert_close(factors.unique(), torch.tensor([0.0, 1 / 0.75]))
    inputs = triple(1, 2, 1, 12, 16, 16)
    formula = lambda q, k, v: expected(q, k, v, None, factors=factors)  # noqa: E731
    compare(lambda q, k, v: call(q, k, v)[0], formula, inputs, torch.float32)


def test_dropout_of_joined_sequences_differs_between_them_and_replays():
    torch.npu.manual_seed(5)
    state = torch.npu.get_rng_state()
    lengths = [(8, 8), (8, 8)]
    unit = torch.eye(8).repeat(2, 1).unsqueeze(1).expand(-1, 2, -1).contiguous()

    def operation(query, key, value):
        torch.npu.set_rng_state(state)
        return npu_joined(2, lengths, keep_prob=0.5)(query, key, value)

    zeros = torch.zeros(16, 2, 8).npu()
    factors = (operation(zeros, zeros, unit.npu()).cpu() * 8).view(2, 8, 2, 8).transpose(1, 2)
    assert not torch.equal(factors[0], factors[1])

    def formula(query, key, value):
        blocks = [
            [x[part].transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
            for part in (slice(8), slice(8, 16))
        ]
        return joined([expected(*b, None, factors=f.double()) for b, f in zip(blocks, factors, strict=True)])

    compare(operation, formula, joined_inputs(2, 2, lengths), torch.float32)


@pytest.mark.parametrize("name", ["npu_fusion_attention", "npu_fusion_attention_v2"])
def test_a_dropout_mask_may_be_given_with_its_seed(name):
    import torch_npu

    mask = torch_npu._npu_dropout_gen_mask(torch.zeros(1).npu(), [2 * 12 * 16], p=0.25, seed=9, offset=4)
    assert mask.dtype == torch.uint8
    bits = (mask.cpu().unsqueeze(-1) >> torch.arange(8)) & 1
    factors = bits.flatten()[: 2 * 12 * 16].view(1, 2, 12, 16) / 0.75
    assert 0.6 < bits.double().mean() < 0.9

    def operation(query, key, value):
        given_mask = {"dropout_mask": mask, "seed": 9, "offset": 4}
        return getattr(torch_npu, name)(
            query, key, value, 2, "BNSD", scale=SCALE, keep_prob=0.75, **given_mask
        )[0]

    inputs = triple(1, 2, 1, 12, 16, 16)
    compare(operation, lambda q, k, v: expected(q, k, v, None, factors=factors), inputs, torch.float32)


@pytest.mark.parametrize("keep_prob", [1.0, 0.5])
def test_attention_draws_from_the_generator_only_for_dropout(keep_prob):
    import torch_npu

    x = torch.ones(1, 2, 16, 8).npu()
    torch.npu.manual_seed(2)
    mask = torch_npu._npu_dropout_gen_mask(x, [512], p=1 - keep_prob, seed=2, offset=0)
    values = torch.eye(16).expand(1, 2, 16, 16).contiguous().npu()
    wide = torch.zeros(1, 2, 16, 16).npu()
    result, *_, seed, offset, _ = torch_npu.npu_fusion_attention(
        wide, wide, values, 2, "BNSD", keep_prob=keep_prob
    )
    kept = (((mask.cpu().unsqueeze(-1) >> torch.arange(8)) & 1) == 1).flatten()[:512]
    assert torch.equal(result.cpu().flatten() > 0, kept)
    assert (seed, offset) == ((2, 0) if keep_prob < 1 else (0, 0))
    drawn = torch.npu.default_generators[torch.npu.current_device()].get_offset()
    assert drawn == (12 if keep_prob < 1 else 0)


def test_dropout_keeps_its_share_and_moves_the_generator_on():
    import torch_npu

    def call(query, key, value):
        return torch_npu.npu_fusion_attention(query, key, value, 2, "BNSD", keep_prob=0.9)

    torch.npu.manual_seed(11)
    first, second = (factors_of(call, 256, 256) for _ in range(2))
    for factors in (first, second):
        assert abs((factors > 0).double().mean().item() - 0.9) < 0.005
    assert not torch.equal(first, second)
    outputs = call(*(torch.zeros(1, 2, 16, 8).npu() for _ in range(3)))
    assert outputs[6] == 2 * 16 * 16
    assert outputs[4] == torch.npu.initial_seed()


# --- the merge step of ring attention ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_halves_of_the_keys_merge_to_the_whole(dtype):
    import torch_npu

    query, key, value = (laid_out(x.to(dtype), "SBH").npu() for x in triple(2, 4, 4, 6, 10, 16))
    whole = torch_npu.npu_fusion_attention(query, key, value, 4, "SBH", scale=SCALE)[:3]
    halves = [
        torch_npu.npu_fusion_attention(query, key[rows], value[rows], 4, "SBH", scale=SCALE)[:3]
        for rows in (slice(0, 3), slice(3, 10))
    ]
    merged = torch_npu.npu_ring_attention_update(*halves[0], *halves[1])
    for got, wanted in zip(merged, whole, strict=True):
        assert_near(got.cpu(), wanted.cpu().double(), dtype)


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_halves_of_joined_sequences_merge_to_the_whole(softmax_layout):
    import torch_npu

    lengths = [4, 2, 5]
    query, key, value = (torch.randn(11, 2, 64) for _ in range(3))

    def attention(parts: list[slice]) -> tuple[Tensor, ...]:
        """Attend to the given rows of every sequence's keys."""
        rows = torch.cat([torch.arange(11).split(lengths)[i][part] for i, part in enumerate(parts)])
        sizes = [len(torch.arange(length)[part]) for length, part in zip(lengths, parts, strict=True)]
        return torch_npu.npu_fusion_attention(
            query.npu(),
            key[rows].npu(),
            value[rows].npu(),
            2,
            "TND",
            actual_seq_qlen=ends(lengths),
            actual_seq_kvlen=ends(sizes),
            softmax_layout=softmax_layout,
        )[:3]

    whole = attention([slice(None)] * 3)
    halves = attention([slice(0, 1)] * 3), attention([slice(1, None)] * 3)
    merged = torch_npu.npu_ring_attention_update(
        *halves[0],
        *halves[1],
        actual_seq_qlen=torch.tensor([0, *ends(lengths)]).npu(),
        input_layout="TND",
        input_softmax_layout=softmax_layout,
    )
    for got, wanted in zip(merged, whole, strict=True):
        assert_near(got.cpu(), wanted.cpu().double(), torch.float32)
