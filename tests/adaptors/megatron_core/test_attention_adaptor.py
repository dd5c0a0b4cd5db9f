"""The core attention of local specs against stock ``DotProductAttention``, on the installed megatron-core."""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import types

import pytest
import torch

from megatron_npu.adaptors.megatron_core.attention import attention_mask, context_parallel
from megatron_npu.adaptors.megatron_core.attention.layer_options import flags_of
from megatron_npu.attention_flags import AttentionFlags
from megatron_npu.errors import UsageError
from megatron_npu.ops.attention import packed_mask
from tests.adaptors.comparison import here, load_stock, same_gradients
from tests.adaptors.megatron_core.conftest import make_config

pytestmark = pytest.mark.usefixtures("single_process")


def attention_pair(layer=1, **changes):
    """Return our attention module and a stock one, with the same configuration."""
    from megatron.core.transformer import dot_product_attention as patched
    from megatron.core.transformer.enums import AttnMaskType

    stock = load_stock("megatron.core.transformer.dot_product_attention")
    kind = getattr(AttnMaskType, changes.pop("mask_type", "causal"))
    arguments = {"softmax_scale": changes.pop("softmax_scale", None)}
    of_what = changes.pop("attention_type", "self")
    flags = changes.pop("flags", AttentionFlags())
    config = make_config(attention_softmax_in_fp32=True, **changes)
    config.attention_flags = flags
    return tuple(
        module.DotProductAttention(config, layer, kind, of_what, **arguments).train()
        for module in (patched, stock)
    )


def leaves_of(*shapes, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=dtype, device=here(), requires_grad=True) for shape in shapes]


def qkv(queries=12, keys=12, heads=4, groups=4, dtype=torch.float32):
    return leaves_of((queries, 2, heads, 8), *[(keys, 2, groups, 8)] * 2, dtype=dtype)


@pytest.mark.parametrize("shape_order", ["SBH", "BSH"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 2},
        {"apply_query_key_layer_scaling": True},
        {"softmax_scale": 0.7},
        {"mask_type": "padding"},
        {"window_size": (3, 0)},
        {"window_size": (3, 2)},
        {"window_size": (40, 0), "num_query_groups": 1},
        {"window_size": (3, 0), "window_attn_skip_freq": 2},
        {"window_size": (3, 0), "window_attn_skip_freq": [0, 1], "layer": 2},
    ],
    ids=lambda changes: "-".join(changes) or "causal",
)
def test_attention(changes, shape_order):
    ours, stock = attention_pair(**changes, flags=AttentionFlags(shape_order=shape_order))
    leaves = qkv(groups=changes.get("num_query_groups", 4))
    mask = None
    if changes.get("mask_type") == "padding":
        mask = torch.zeros(2, 1, 1, 12, dtype=torch.bool, device=here())
        mask[1, ..., 9:] = True
    same_gradients(ours(*leaves, mask), stock(*leaves, mask), leaves)


def test_bf16():
    ours, stock = attention_pair(bf16=True)
    leaves = qkv(dtype=torch.bfloat16)
    same_gradients(ours(*leaves, None), stock(*leaves, None), leaves, atol=3e-2, rtol=3e-2)


@pytest.mark.skipif("here().type != 'cpu'", reason="counts the CPU's calls")
def test_attention_is_the_fused_one(monkeypatch):
    """The scores are never materialised: torch's fused attention is called, the stock forward is not."""
    calls = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append(k["is_causal"]) or fused(*a, **k),
    )
    ours, _ = attention_pair()
    ours(*qkv(), None)
    assert calls == [True]


# -- masks that a data loader builds ----------------------------------------------------------------


def document_mask(*rows):
    """Return ``[b, 1, s, s]``: causal within the documents of each row, as Megatron's datasets build it."""
    masks = []
    for lengths in rows:
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        seen = (document[:, None] == document) & torch.ones(sum(lengths), sum(lengths)).tril().bool()
        masks.append(~seen)
    return torch.stack(masks)[:, None].to(here())


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([[12], [12]], (12, 12)),
        ([[12]], (12,)),
        ([[5, 7], [1, 2, 9]], (5, 7, 1, 2, 9)),
        ([[1] * 12, [12]], (*[1] * 12, 12)),
    ],
    ids=str,
)
def test_document_masks_are_recognised(rows, lengths):
    ours, stock = attention_pair()
    leaves, mask = qkv(), document_mask(*rows)
    assert packed_mask.sequence_lengths(mask) == lengths
    same_gradients(ours(*leaves, mask), stock(*leaves, mask), leaves)


def other_masks():
    triangle = document_mask([12])
    one_pair = triangle.clone()
    one_pair[0, 0, 7, 3] = True
    window = triangle | torch.ones(12, 12, device=here()).tril(-4).bool()
    prefix = triangle.clone()
    prefix[..., :5, :5] = False
    return {"one pair": one_pair, "window": window, "prefix": prefix, "none": torch.zeros_like(triangle)}


@pytest.mark.parametrize("name", ["one pair", "window", "prefix", "none"])
def test_other_masks_are_applied_as_they_are(name):
    """Also where the module is causal: upstream then takes the mask alone."""
    mask = other_masks()[name]
    assert packed_mask.sequence_lengths(mask) is None
    ours, stock = attention_pair()
    leaves = qkv()
    same_gradients(ours(*leaves, mask), stock(*leaves, mask), leaves)


def test_a_mask_is_read_once_per_batch(monkeypatch):
    read = []
    monkeypatch.setattr(packed_mask, "_read", lambda mask: read.append(mask) or (12,))
    ours, _ = attention_pair()
    mask = document_mask([12])
    for _ in range(3):
        ours(*qkv(), mask)
    assert len(read) == 1
    mask[0, 0, 5, 2] = True  # the buffer is used again, for another batch
    ours(*qkv(), mask)
    assert len(read) == 2


# -- packed sequences -------------------------------------------------------------------------------


def packed_params(*lengths, padded=None, key_lengths=None):
    from megatron.core.packed_seq_params import PackedSeqParams

    def ends(values):
        return torch.tensor([0, *values], device=here()).cumsum(0).int()

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends(lengths),
        cu_seqlens_kv=ends(key_lengths or lengths),
        cu_seqlens_q_padded=None if padded is None else ends(padded),
        cu_seqlens_kv_padded=None if padded is None else ends(padded),
    )


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
    with pytest.raises(UsageError, match="a cp_group of 2 ranks, and context_parallel_size 1"):
        ours(*leaves_of(*[(16, 4, 8)] * 3), None, packed_seq_params=params)


# -- windows, caches, dropout -----------------------------------------------------------------------


def test_window_flags_reach_the_attention():
    _, stock = attention_pair(window_size=(3, 0))
    narrow, plain = attention_pair(flags=AttentionFlags(3, 0))
    leaves = qkv()
    for mask in (None, document_mask([12], [12])):
        torch.testing.assert_close(narrow(*leaves, mask), stock(*leaves, None))
    wide, _ = attention_pair(flags=AttentionFlags(65536, 65536))
    torch.testing.assert_close(wide(*leaves, None), plain(*leaves, None))


def test_window_flags_leave_cross_attention_alone():
    ours, stock = attention_pair(attention_type="cross", mask_type="no_mask", flags=AttentionFlags(1))
    leaves = qkv(queries=6)
    same_gradients(ours(*leaves, None), stock(*leaves, None), leaves)


def test_a_script_has_the_flags_among_its_arguments(monkeypatch):
    """Those of the configuration win: a script may build a model that is not of its own arguments."""
    script = types.SimpleNamespace(_GLOBAL_ARGS=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", script)
    assert flags_of(make_config()) == AttentionFlags()
    script._GLOBAL_ARGS = argparse.Namespace(pre_tokens=3, next_tokens=0, shape_order="BSH")
    config = make_config()
    assert flags_of(config) == AttentionFlags(3, 0, "BSH")
    assert positional_attention().layer_options.window == (3, 0)
    config.attention_flags = AttentionFlags(5)
    assert flags_of(config) == AttentionFlags(5)
    script._GLOBAL_ARGS = argparse.Namespace(window_size=None)  # of a program with a parser of its own
    assert flags_of(make_config()) == AttentionFlags()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_of_a_configuration_has_its_flags(copied):
    """Upstream copies configurations for experts, encoders, decoders, and inference."""
    config = make_config()
    config.attention_flags = AttentionFlags(3, 0)
    assert flags_of(copied(config)) == AttentionFlags(3, 0)


def small_gpt(flags=None, **changes):
    """Return a GPT, whose weights are always the same."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = make_config(add_qkv_bias=True, bias_activation_fusion=True, **changes)
    if flags is not None:
        config.attention_flags = flags
    torch.manual_seed(7)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=12).train().to(here())


def losses_of(*models):
    """Return the losses of a batch, and the gradients of the first weights; all forwards come first."""
    tokens = torch.arange(24, device=here()).view(2, 12) * 5 % 64
    position = torch.arange(12, device=here()).expand(2, 12)
    losses = [model(tokens, position, None, labels=tokens).mean() for model in models]
    for loss in losses:
        loss.backward()
    weights = [model.decoder.layers[0].self_attention.linear_qkv.weight for model in models]
    return list(zip(losses, [weight.grad for weight in weights], strict=True))


def test_two_models_of_one_process_keep_their_windows():
    """Also where a layer is computed again in the backward pass, when the other model has run meanwhile."""
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    narrow, wide = small_gpt(AttentionFlags(3, 0), **again), small_gpt(AttentionFlags(65536), **again)
    expected = losses_of(small_gpt(window_size=(3, 0))) + losses_of(small_gpt())
    found = losses_of(narrow, wide)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[0][1], found[1][1])
    assert narrow.state_dict().keys() == wide.state_dict().keys() == small_gpt().state_dict().keys()


@pytest.mark.parametrize("window", [None, (4, 0)])
def test_cached_keys(window):
    """New queries behind cached keys see what the last queries of the whole see."""
    from megatron.core.transformer.enums import AttnMaskType

    ours, stock = attention_pair(window_size=window)
    query, key, value = qkv()
    whole = stock(query, key, value, None)
    torch.testing.assert_close(ours(query[10:], key, value, None), whole[10:])
    one = ours(query[11:], key, value, None, attn_mask_type=AttnMaskType.no_mask)  # as upstream decodes
    torch.testing.assert_close(one, whole[11:])


@pytest.mark.parametrize("changes", [{}, {"window_size": (3, 0)}], ids=["causal", "window"])
def test_dropout_draws_from_the_tracker(changes):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    ours, _ = attention_pair(attention_dropout=0.5, **changes)
    leaves = qkv()
    states = get_cuda_rng_tracker().get_states()
    default = torch.cuda.get_rng_state()
    first = ours(*leaves, None)
    assert torch.equal(torch.cuda.get_rng_state(), default), "the default generator must not move"
    assert not torch.equal(ours(*leaves, None), first), "the tracker's generator must move"
    get_cuda_rng_tracker().set_states(states)
    assert torch.equal(ours(*leaves, None), first)
    assert torch.equal(ours.eval()(*leaves, None), ours.eval()(*leaves, None))


def test_recomputation_drops_the_same_weights():
    """Megatron's checkpoint restores the tracker's states before it runs the forward again."""
    from megatron.core import tensor_parallel

    ours, _ = attention_pair(attention_dropout=0.5)
    leaves = qkv()
    grad = torch.ones(12, 2, 32, device=here())
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    plain = torch.autograd.grad(ours(*leaves, None), leaves, grad)
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
    result = tensor_parallel.checkpoint(lambda *t: ours(*t, None), False, *leaves)
    result.backward(grad)
    for left, leaf in zip(plain, leaves, strict=True):
        assert torch.equal(left, leaf.grad)


# -- options of the layer around it -------------------------------------------------------------------


def self_attention(backend, **changes):
    """Return a layer's self-attention with core attention of ``backend``, and always the same weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    torch.manual_seed(5)
    spec = changes.pop("spec", {})
    kind = MLATransformerConfig if spec.get("multi_latent_attention") else None
    config = make_config(kind, attention_backend=AttnBackend[backend], **changes)
    layer = build_module(
        get_gpt_layer_local_spec(**spec).submodules.self_attention, config=config, layer_number=1
    )
    return layer.train().to(here())


LATENT = {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_output_gate": True},
        {"qk_layernorm": True, "spec": {"qk_layernorm": True}},
        {"spec": {"qk_l2_norm": True}},
        {"spec": {"multi_latent_attention": True}, **LATENT},
        {"spec": {"multi_latent_attention": True}, **LATENT, "q_lora_rank": 8, "rope_type": "rope"},
    ],
    ids=["gate", "qk-layernorm", "qk-l2-norm", "latent", "latent-rope"],
)
def test_fused_attention_in_the_layer_is_upstreams(changes):
    fused, unfused = (self_attention(backend, **changes) for backend in ("auto", "unfused"))
    hidden = torch.randn(9, 2, 32, device=here(), requires_grad=True)
    same_gradients(fused(hidden, None)[0], unfused(hidden, None)[0], [hidden])


def test_two_head_sizes_have_the_scale_of_the_keys():
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    layer = DotProductAttention(make_config(), 1, AttnMaskType.causal, "self", k_channels=12, v_channels=6)
    query, key, value = leaves_of((7, 2, 4, 12), (7, 2, 4, 12), (7, 2, 4, 6))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) / 12**0.5
    scores.masked_fill_(torch.ones(7, 7, device=here()).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), value).flatten(2)
    same_gradients(layer(query, key, value, None), expected, [query, key, value])


def test_qk_l2_norm_of_the_script_reaches_the_local_spec(monkeypatch):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import L2Norm

    def norm(**arguments):
        return get_gpt_layer_local_spec(**arguments).submodules.self_attention.submodules.q_layernorm

    script = types.SimpleNamespace(_GLOBAL_ARGS=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", script)
    assert norm() is not L2Norm
    script._GLOBAL_ARGS = types.SimpleNamespace(qk_l2_norm=True)
    assert norm() is L2Norm
    assert norm(qk_l2_norm=False) is not L2Norm
    order = list(inspect.signature(get_gpt_layer_local_spec).parameters.values())
    positional = [p.default for p in order[: [p.name for p in order].index("qk_l2_norm")]]
    spec = get_gpt_layer_local_spec(*positional, False)
    assert spec.submodules.self_attention.submodules.q_layernorm is not L2Norm


def positional_attention(*arguments, **named):
    """Return a DotProductAttention made with arguments in upstream's order behind the configuration."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    return DotProductAttention(make_config(), 1, AttnMaskType.causal, "self", *arguments, **named)


def test_arguments_may_be_positional():
    module = positional_attention(0.25, 0.5, "p2p")
    assert (module.attention_dropout.p, module.softmax_scale) == (0.25, 0.5)
    assert module.layer_options.cp_comm_type is None  # nothing is cut


def test_a_positional_scale_is_not_scaled_again_for_the_size_of_keys():
    assert positional_attention(None, 0.5, k_channels=12, v_channels=8).softmax_scale == 0.5


@pytest.mark.parametrize("option", ["qk_clip", "log_max_attention_logit"])
def test_the_maximum_of_scores_is_refused(option):
    with pytest.raises(UsageError, match="--" + option.replace("_", "-")):
        attention_pair(**{option: True})


# -- what goes to upstream's forward ----------------------------------------------------------------


def test_unfused_backend_runs_upstreams_forward(monkeypatch):
    from megatron.core.transformer.enums import AttnBackend

    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: pytest.fail("fused")
    )
    ours, stock = attention_pair(attention_backend=AttnBackend.unfused)
    leaves = qkv()
    torch.testing.assert_close(ours(*leaves, None), stock(*leaves, None))


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_other_softmaxes_are_upstreams_and_said(softmax_type, monkeypatch):
    from megatron_npu.ops import dispatch

    ours, stock = attention_pair(softmax_type=softmax_type)
    stock.load_state_dict(ours.state_dict())
    leaves = qkv()
    torch.testing.assert_close(ours(*leaves, None), stock(*leaves, None))
    assert dispatch.fallbacks["attention", f"softmax_type={softmax_type}"] >= 1
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    with pytest.raises(dispatch.FallbackForbiddenError, match=softmax_type):
        ours(*leaves, None)


def test_an_unknown_packing_is_upstreams_to_refuse():
    ours, _ = attention_pair()
    params = packed_params(5, 7)
    params.qkv_format = "sbhd"
    with pytest.raises(AssertionError, match="Packed sequence is not supported"):
        ours(*qkv(), None, packed_seq_params=params)
