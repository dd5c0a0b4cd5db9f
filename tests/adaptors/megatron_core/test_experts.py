"""The grouped experts of megatron-core against its sequential ones, on the installed megatron-core."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_npu.adaptors.megatron_core.experts import grouped_linear
from megatron_npu.ops import dispatch
from tests.adaptors.megatron_core.conftest import make_config
from tests.support.comparison import here, load_stock, same_gradients

pytestmark = pytest.mark.usefixtures("single_process")
MIXTURE = {
    "num_moe_experts": 3,
    "moe_ffn_hidden_size": 24,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}


def experts(kind, config):
    """Return a module with the experts of this process, and its rows of weights, one of each per expert."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection

    module, submodules = LocalSpecProvider().grouped_mlp_modules(kind == "grouped", False)
    arguments = {} if submodules is None else {"submodules": submodules}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return module(3, config, pg_collection=groups, **arguments).to(here(), torch.bfloat16)


@pytest.mark.parametrize("counts", [[4, 0, 5], [9, 0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_grouped_experts_are_the_sequential_ones(counts, recompute):
    changes = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]} if recompute else {}
    torch.manual_seed(3)
    grouped = experts("grouped", make_config(**MIXTURE, bf16=True, moe_grouped_gemm=True, **changes))
    sequential = experts("sequential", make_config(**MIXTURE, bf16=True))
    first = grouped.weight1.view(3, 32, 48).transpose(1, 2)
    second = grouped.weight2.view(3, 24, 32).transpose(1, 2)
    for expert, up, down in zip(sequential.local_experts, first, second, strict=True):
        expert.linear_fc1.weight.data.copy_(up)
        expert.linear_fc2.weight.data.copy_(down)
    hidden = torch.randn(sum(counts), 32, dtype=torch.bfloat16, device=here(), requires_grad=True)
    probs = torch.rand(sum(counts), dtype=torch.bfloat16, device=here(), requires_grad=True)
    results = [each(hidden, torch.tensor(counts), probs)[0] for each in (grouped, sequential)]
    if recompute:  # .grad() is not for checkpoints
        torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)
        results[0].sum().backward()
        assert grouped.weight1.grad.any() == bool(sum(counts))
    else:
        same_gradients(*results, [hidden, probs], atol=2e-2, rtol=2e-2)


def test_an_expert_adds_its_bias_by_the_routers_share():
    changes = {"add_bias_linear": True, "bias_activation_fusion": False}
    module = experts("sequential", make_config(**MIXTURE | changes, bf16=True))
    hidden = torch.randn(5, 32, dtype=torch.bfloat16, device=here(), requires_grad=True)
    probs = torch.rand(5, dtype=torch.bfloat16, device=here(), requires_grad=True)
    for expert in module.local_experts:
        torch.nn.init.normal_(expert.linear_fc2.bias)
    output, bias = module(hidden, torch.tensor([5, 0, 0]), probs)
    expert = module.local_experts[0]
    inner = torch.nn.functional.linear(hidden, expert.linear_fc1.weight, expert.linear_fc1.bias).chunk(2, -1)
    inner = torch.nn.functional.silu(inner[0]) * inner[1]
    expected = torch.nn.functional.linear(inner, expert.linear_fc2.weight, expert.linear_fc2.bias)
    assert bias is None
    same_gradients(output, expected * probs[:, None], [hidden, probs], atol=2e-2, rtol=2e-2)


def test_the_package_is_stood_in_for():
    from megatron.core.transformer.moe import grouped_gemm_util

    assert grouped_gemm_util.grouped_gemm_is_available()
    with pytest.raises(AssertionError, match="not available"):
        load_stock("megatron.core.transformer.moe.grouped_gemm_util").assert_grouped_gemm_is_available()
    a, b = torch.randn(5, 4, device=here()), torch.randn(2, 4, 3, device=here())
    counts = torch.tensor([2, 3])
    plain = grouped_gemm_util.ops.gmm(a, b, counts, trans_b=False)
    turned = grouped_gemm_util.ops.gmm(a, b.transpose(1, 2).contiguous(), counts, trans_b=True)
    torch.testing.assert_close(plain, turned)


def moe_layer(**changes):
    """Return a mixture of three experts, two of them for each token."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    torch.manual_seed(4)
    balanced = {"moe_router_load_balancing_type": "none"} | changes
    config = make_config(**MIXTURE, moe_router_topk=2, **balanced)
    spec = get_moe_module_spec(use_te=False, num_experts=3, moe_grouped_gemm=False)
    return MoELayer(config, submodules=spec.submodules).to(here())


def test_fused_permutation_is_the_plain_one(monkeypatch):
    """A whole layer with --moe-permute-fusion, and one without: the same numbers, by our operation."""
    from megatron_npu.adaptors.megatron_core.experts import token_permutation

    calls = []
    ours = token_permutation.permute_tokens
    monkeypatch.setattr(token_permutation, "permute_tokens", lambda *args: calls.append(1) or ours(*args))
    fused = moe_layer(moe_permute_fusion=True, moe_token_dispatcher_type="alltoall")
    plain = moe_layer(moe_token_dispatcher_type="alltoall")
    hidden = torch.randn(6, 2, 32, device=here(), requires_grad=True)
    results = [layer(hidden)[0] for layer in (fused, plain)]
    assert calls == [1]
    same_gradients(*results, [hidden])
    results = [layer(hidden)[0] for layer in (fused, plain)]
    grads = [
        torch.autograd.grad(out.square().sum(), layer.router.weight)[0]
        for out, layer in zip(results, (fused, plain), strict=True)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("fused", [False, True])
def test_shared_experts_overlapped_are_the_plain_ones(fused):
    """--moe-shared-expert-overlap computes them on a stream of their own, between the exchanges of tokens."""
    results = []
    for overlap in (False, True):
        layer = moe_layer(
            moe_shared_expert_intermediate_size=16,
            moe_shared_expert_overlap=overlap,
            moe_permute_fusion=fused,
            moe_token_dispatcher_type="alltoall",
        )
        hidden = torch.randn(6, 2, 32, device=here(), requires_grad=True)
        output, _ = layer(hidden)
        (output * torch.randn_like(output)).sum().backward()
        results.append([output, hidden.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert len(results[0]) > 4
    for plain, overlapped in zip(*results, strict=True):
        torch.testing.assert_close(overlapped, plain)


def test_the_counts_of_newer_versions_are_handed_through():
    """0.17's permutation returns two values more; a map that carries no number of experts is upstream's."""
    from megatron_npu.adaptors.megatron_core.experts import token_permutation

    tokens, counts = torch.randn(3, 4, device=here()), torch.tensor([2, 1])
    routing = torch.tensor([[True, False], [False, True], [True, False]], device=here())
    permute = partial(token_permutation.permute_with_counts, lambda *args, **kwargs: (args, kwargs, 0, 0, 0))
    args, kwargs, *_ = permute(tokens, routing, None, tokens_per_expert=counts, fused=False)
    assert (args[0] is tokens, kwargs) == (True, {"tokens_per_expert": counts, "fused": False})
    setattr(routing, token_permutation._COPIES, 1)
    rows, probs, _, padding, handed = permute(tokens, routing, tokens_per_expert=counts)
    torch.testing.assert_close(rows, tokens[[0, 2, 1]])
    assert (probs, padding, handed) == (None, None, counts)


def test_permutation_that_cannot_be_fused_is_plain_and_said():
    """Tokens that are dropped, and those of another dispatcher."""
    hidden = torch.randn(6, 2, 32, device=here())
    options = {"moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 0.5}
    results = [moe_layer(**options, moe_permute_fusion=fused)(hidden)[0] for fused in (True, False)]
    torch.testing.assert_close(*results)
    make_config(**MIXTURE, moe_permute_fusion=True, moe_token_dispatcher_type="allgather")
    reasons = [reason for name, reason in dispatch.fallbacks if name == "moe-permute-fusion"]
    assert any("dropped or padded" in reason for reason in reasons)
    assert any("dispatcher allgather" in reason for reason in reasons)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["GroupedLinear", "RowGroupedLinear"])
def test_grouped_layers_are_linear_layers_of_each_expert(kind, bias):
    """They are what upstream's grouped experts are made of since 0.17."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    torch.manual_seed(5)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = getattr(grouped_linear, kind)(
        3,
        32,
        24,
        config=make_config(**MIXTURE),
        init_method=torch.nn.init.normal_,
        bias=bias,
        skip_bias_add=kind == "RowGroupedLinear",
        pg_collection=groups,
    ).to(here())
    for each in layer._each("bias") if bias else []:
        torch.nn.init.normal_(each)
    rows = torch.randn(9, 32, device=here(), requires_grad=True)
    counts = [4, 0, 5]
    output, left = layer(rows, counts)
    assert (left is not None) is (bias and kind == "RowGroupedLinear")
    biases = layer._each("bias") if bias and left is None else [None] * 3
    pairs = zip(rows.split(counts), layer._each("weight"), biases, strict=True)
    expected = torch.cat([torch.nn.functional.linear(part, *each) for part, *each in pairs])
    same_gradients(output, expected, [rows, layer.weight0, layer.weight2], atol=1e-4)
    sharded = layer.sharded_state_dict("experts.", metadata={"dp_cp_group": groups.dp_cp})
    assert {value.key for name, value in sharded.items() if "weight" in name} == {"experts.weight"}
    assert [sharded[f"experts.weight{i}"].global_offset[0] for i in range(3)] == [0, 1, 2]
    layer.load_state_dict(layer.state_dict() | {"_extra_state1": None, "_extra_state2": None})
