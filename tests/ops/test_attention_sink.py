"""Attention with a sink: one more score for each head, beside the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.ops import dispatch
from megatron_npu.ops.attention import PackedSequences, attention
from tests.ops.against_fp64 import check

HEADS, GROUPS, SIZE, SCALE = 4, 2, 16, 0.25


def formula(query, key, value, sink, hidden):
    """``[s, b, n, d]`` and ``[s, b, g, d]`` to ``[s, b, n, d]``."""
    key, value = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) * SCALE
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + sink.exp().view(1, -1, 1, 1)
    return torch.einsum("bnij,jbnd->ibnd", weights / total, value)


def leaves(device, tokens, batch=2):
    generator = torch.Generator().manual_seed(3)
    shapes = [(tokens, batch, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)] + [(HEADS,)]
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def hidden_of(tokens, left=None):
    row = torch.arange(tokens)[:, None]
    column = torch.arange(tokens)
    return (column > row) | (column < row - (tokens if left is None else left))


@pytest.mark.parametrize("left", [None, 5])
def test_sinks_take_their_share_of_the_weights(device, dtype, left):
    def operation(query, key, value, sink):
        options = {"causal": True, "window": (left, None), "sink": sink}
        return attention(query, key, value, layout="SBND", scale=SCALE, **options)

    hidden = hidden_of(21, left)
    check(operation, lambda *t: formula(*t, hidden), leaves(device, 21), dtype)


def test_softmax_off_by_one_is_a_sink_of_zero(device, dtype):
    query, key, value, sink = leaves(device, 12)
    zeros = torch.zeros_like(sink)

    def operation(query, key, value):
        return attention(query, key, value, layout="SBND", scale=SCALE, sink=zeros)

    def one_more(query, key, value):
        key, value = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (key, value))
        weights = (torch.einsum("ibnd,jbnd->bnij", query, key) * SCALE).exp()
        return torch.einsum("bnij,jbnd->ibnd", weights / (1 + weights.sum(-1, keepdim=True)), value)

    check(operation, one_more, [query, key, value], dtype)


def test_packed_sequences_have_the_same_sink(device, dtype):
    lengths = (7, 1, 12)
    packed = PackedSequences(lengths, lengths)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    hidden = hidden_of(20) | (document[:, None] != document)

    def operation(query, key, value, sink):
        query, key, value = (t.squeeze(1) for t in (query, key, value))
        options = {"causal": True, "packed": packed, "sink": sink}
        return attention(query, key, value, layout="TND", scale=SCALE, **options).unsqueeze(1)

    check(operation, lambda *t: formula(*t, hidden), leaves(device, 20, 1), dtype)


def test_a_mask_may_hide_every_key(device, dtype):
    """All of the weight is the sink's then; such a call has no kernel but the npu's."""
    hidden = hidden_of(9).index_fill(0, torch.tensor([4]), True)

    def operation(query, key, value, sink):
        mask = hidden.to(query.device)
        return attention(query, key, value, layout="SBND", scale=SCALE, mask=mask, sink=sink)

    dispatch.fallbacks.clear()
    check(operation, lambda *t: formula(*t, hidden), leaves(device, 9), dtype)
    reported = [reason for name, reason in dispatch.fallbacks if name == "attention_sink"]
    assert reported == ([] if device == "npu" else ["a sink cannot be combined with a mask"])


def test_a_sink_is_a_number_for_each_head(device):
    *tensors, sink = leaves(device, 4)
    with pytest.raises(ValueError, match=r"shape \(4,\).*but got \(3,\)"):
        attention(*tensors, layout="SBND", scale=SCALE, sink=sink[:3])


def test_dropped_weights_leave_the_sink_its_share(device):
    """The weights are dropped after the softmax: the mean over masks is the undropped result."""
    query, key, value, sink = (t.requires_grad_() for t in leaves(device, 8))
    options = {"layout": "SBND", "scale": SCALE, "sink": sink}
    expected = attention(query, key, value, **options)
    torch.manual_seed(1)
    outputs = [attention(query, key, value, dropout_p=0.25, **options) for _ in range(300)]
    torch.testing.assert_close(sum(outputs) / 300, expected, rtol=0.0, atol=0.2)
    grads = [torch.autograd.grad(output.sum(), sink, retain_graph=True)[0] for output in outputs]
    right = torch.autograd.grad(expected.sum(), sink)[0]
    torch.testing.assert_close(sum(grads) / 300, right, rtol=0.1, atol=0.3)
    torch.manual_seed(1)
    assert torch.equal(attention(query, key, value, dropout_p=0.25, **options), outputs[0])
