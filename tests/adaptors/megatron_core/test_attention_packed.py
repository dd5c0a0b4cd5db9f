"""Packed sequences (thd) against stock ``DotProductAttention``, sequence by sequence."""

from __future__ import annotations

import copy
import types

import pytest
import torch

from megatron_npu.adaptors.megatron_core.attention import attention_mask, context_parallel
from megatron_npu.base.errors import UsageError
from tests.adaptors.megatron_core.conftest import make_config
from tests.adaptors.megatron_core.core_attention import attention_pair, leaves_of, packed_params, qkv
from tests.support.comparison import here, same_gradients

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_packed_sequences(groups, window):
    """thd against stock, document by document; upstream itself refuses packed sequences here."""
    ours, stock = attention_pair(num_query_groups=groups, window_size=window)
    leaves = leaves_of(*((14, n, 8) for n in (4, groups, groups)))
    result = ours(*leaves, None, packed_seq_params=packed_params(5, 2, 7))
    assert result.shape == (14, 32)
    parts = zip(*(t.split([5, 2, 7]) for t in leaves), strict=True)
    expected = torch.cat([stock(*(t[:, None] for t in part), None)[:, 0] for part in parts])
    same_gradients(result, expected, leaves)


def test_padding_between_packed_sequences():
    ours, stock = attention_pair()
    leaves = leaves_of(*[(16, 4, 8)] * 3)
    result = ours(*leaves, None, packed_seq_params=packed_params(3, 5, padded=(4, 8)))
    used = [slice(0, 3), slice(4, 9)]  # and 1, 3 and 4 tokens that are padding
    expected = torch.cat([stock(*(t[u, None] for t in leaves), None)[:, 0] for u in used])
    same_gradients(torch.cat([result[u] for u in used]), expected, leaves)


def test_packed_through_self_attention():
    """The whole SelfAttention: projections, reshaping, the checkpoint of core attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec().submodules.self_attention
    config = make_config(recompute_granularity="selective", recompute_modules=["core_attn"])
    layer = build_module(spec, config=config, layer_number=1).train().to(here())
    torch.manual_seed(5)
    hidden, grad = (torch.randn(9, 1, 32, device=here()) for _ in range(2))
    together, apart = (hidden.clone().requires_grad_() for _ in range(2))
    packed, _ = layer(together, None, packed_seq_params=packed_params(4, 5))
    parts = torch.cat([layer(part, None)[0] for part in apart.split([4, 5])])
    torch.testing.assert_close(packed, parts)
    packed.backward(grad)  # .grad() is not for checkpoints
    parts.backward(grad)
    torch.testing.assert_close(together.grad, apart.grad)


def test_packed_lengths_are_read_once_per_batch():
    params = packed_params(5, 0, 7, padded=(6, 0, 8))
    found = attention_mask.packed_sequences(params, 14, 14)
    assert found.query_lengths == found.key_lengths == (5, 1, 7, 1)
    assert attention_mask.packed_sequences(params, 14, 14) is found


def new_boundaries(params):
    """Yield the parameters of a second batch of as many tokens, in each way that a loop may make them."""
    other = copy.copy(params)
    other.cu_seqlens_q = other.cu_seqlens_kv = params.cu_seqlens_q.new_tensor([0, 4, 16])
    yield "a copy with other tensors", other
    for ends in (params.cu_seqlens_q, params.cu_seqlens_kv):
        ends.copy_(ends.new_tensor([0, 4, 16]))
    yield "the same tensors, written to", params


def test_boundaries_of_the_last_batch_are_not_used_again():
    ours, stock = attention_pair()
    params, leaves = packed_params(8, 8), leaves_of(*[(16, 4, 8)] * 3)
    ours(*leaves, None, packed_seq_params=params)
    parts = zip(*(t.split([4, 12]) for t in leaves), strict=True)
    expected = torch.cat([stock(*(t[:, None] for t in part), None)[:, 0] for part in parts])
    for how, other in new_boundaries(params):
        torch.testing.assert_close(ours(*leaves, None, packed_seq_params=other), expected, msg=how)


def test_documents_are_dealt_out_anew_for_each_batch():
    """The same under context parallelism, whose plan of the tokens is kept, too."""
    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    params = packed_params(8, 8)

    def plan(of):
        return context_parallel.sharding_of_batch(of, 8, True, group, here())

    first = plan(params)
    assert plan(params) is first
    for how, other in new_boundaries(params):
        assert plan(other).packed.query_lengths == (1, 1, 3, 3), how


def test_a_batch_that_is_cut_is_not_taken_for_a_whole_one():
    ours, _ = attention_pair()
    params = packed_params(8, 8)
    params.cp_group = types.SimpleNamespace(size=lambda: 2)
    with pytest.raises(UsageError, match="a cp_group of 2 ranks, but context_parallel_size is 1"):
        ours(*leaves_of(*[(16, 4, 8)] * 3), None, packed_seq_params=params)


def test_an_unknown_packing_is_upstreams_to_refuse():
    ours, _ = attention_pair()
    params = packed_params(5, 7)
    params.qkv_format = "sbhd"
    with pytest.raises(AssertionError, match="Packed sequence is not supported"):
        ours(*qkv(), None, packed_seq_params=params)
