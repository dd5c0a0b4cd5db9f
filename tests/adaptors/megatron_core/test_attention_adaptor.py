"""The core attention of local specs against stock ``DotProductAttention``, on the installed megatron-core."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.ops.attention import packed_mask
from megatron_npu.options.attention_flags import AttentionFlags
from tests.adaptors.megatron_core.conftest import make_config
from tests.adaptors.megatron_core.core_attention import (
    attention_pair,
    document_mask,
    leaves_of,
    positional_attention,
    qkv,
)
from tests.support.comparison import here, same_gradients

pytestmark = pytest.mark.usefixtures("single_process")


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


@pytest.mark.parametrize("skipped", [2, [0, 1]])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_window_of_the_flags_is_left_out_of_layers(layer, skipped):
    """``--pre-tockens`` heeds ``--window-attn-skip-freq``, as upstream's window does."""
    some = {"window_attn_skip_freq": skipped, "layer": layer}
    ours, _ = attention_pair(flags=AttentionFlags(pre_tokens=3), **some)
    _, stock = attention_pair(window_size=(3, 0), **some)
    leaves = qkv()
    same_gradients(ours(*leaves, None), stock(*leaves, None), leaves)


def test_bf16():
    ours, stock = attention_pair(bf16=True)
    leaves = qkv(dtype=torch.bfloat16)
    same_gradients(ours(*leaves, None), stock(*leaves, None), leaves, atol=3e-2, rtol=3e-2)


@pytest.mark.skipif("here().type != 'cpu'", reason="the case: counts the CPU's calls")
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


# -- caches, dropout -----------------------------------------------------------------------


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


def test_dropout_without_a_seeded_tracker_draws_from_the_device():
    """As TransformerEngine's attention does: Mimo's schedules, for instance, seed no tracker."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    ours, _ = attention_pair(attention_dropout=0.5)
    leaves = qkv()
    seeded = get_cuda_rng_tracker().get_states()
    get_cuda_rng_tracker().reset()
    try:
        before = torch.cuda.get_rng_state()
        first = ours(*leaves, None)
        torch.cuda.set_rng_state(before)
        assert torch.equal(ours(*leaves, None), first)
        assert not torch.equal(ours(*leaves, None), first)
    finally:
        get_cuda_rng_tracker().set_states(seeded)


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
def test_other_softmaxes_are_fused_too(softmax_type, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    ours, stock = attention_pair(softmax_type=softmax_type)
    stock.load_state_dict(ours.state_dict())
    leaves = qkv()
    outputs = [module(*leaves, None) for module in (ours, stock)]
    torch.testing.assert_close(*outputs)
    wanted = [
        [*leaves, *module.parameters()] for module in (ours, stock)
    ]  # with the offset, where it is learned
    grads = [
        torch.autograd.grad(output.square().sum(), of) for output, of in zip(outputs, wanted, strict=True)
    ]
    for ours_, stock_ in zip(*grads, strict=True):
        torch.testing.assert_close(ours_, stock_)
    assert len(grads[0]) == 3 + (softmax_type == "learnable")


def test_a_learned_offset_is_cut_by_heads():
    (ours, _) = attention_pair(softmax_type="learnable")
    assert (
        ours.softmax_offset.tensor_model_parallel
    )  # else the norm of gradients counts the first rank's alone
    assert ours.softmax_offset.partition_dim == 0
