"""--moe-router-fusion against upstream's router without it: its functions, a whole layer, other versions."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.ops import dispatch
from tests.adaptors.megatron_core import expert_routing_worker as worker
from tests.adaptors.megatron_core.test_experts import moe_layer
from tests.support import on_version
from tests.support.comparison import here, same_gradients

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("router", [name for name in worker.ROUTERS if "sqrt" not in name])  # since 0.18
def test_routers(router):
    worker.compare_routers(worker.ROUTERS[router])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_and_losses(score):
    worker.compare_losses(score)


@pytest.mark.parametrize("version", ["0.14.0", "0.19.2"])
def test_other_versions(version):
    on_version.run("expert_routing_worker", version)


def test_padding_has_no_scores_and_no_loss():
    from megatron.core.transformer.moe import moe_utils

    logits = worker.random_logits()
    padding = torch.arange(24, device=here()) > 20
    (chosen, ours), (right, plain) = (
        moe_utils.compute_routing_scores_for_aux_loss(logits, 4, "softmax", fused=fused, padding_mask=padding)
        for fused in (True, False)
    )
    assert torch.equal(chosen, right)
    assert not chosen[21:].any()
    same_gradients(ours, plain, [logits])
    leaves = torch.rand(24, 16, device=here(), requires_grad=True)
    losses = [
        moe_utils.switch_load_balancing_loss_func(
            leaves, right.sum(0), right.sum() // 4, 4, 16, 0.3, fused=fused, padding_mask=~padding
        )
        for fused in (True, False)
    ]
    same_gradients(*losses, [leaves])


ROUTED = {
    "default": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "of each sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "sigmoid and bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}


@pytest.mark.parametrize("router", ROUTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_whole_layer(router, dtype):
    """The same output and the same gradients, by our operation and by upstream's."""
    results = []
    hidden = torch.randn(6, 2, 32, device=here(), dtype=dtype, requires_grad=True)
    grad = torch.randn(6, 2, 32, device=here(), dtype=dtype)
    for fused in (True, False):
        layer = moe_layer(**ROUTED[router], moe_router_fusion=fused, bf16=dtype is torch.bfloat16).to(dtype)
        assert layer.config.moe_router_fusion is fused
        output, _ = layer(hidden)
        grads = torch.autograd.grad(output, [hidden, layer.router.weight], grad)
        results.append([output, *grads])
    tolerance = {"atol": 3e-2, "rtol": 3e-2} if dtype is torch.bfloat16 else {}
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, **tolerance)


def test_replayed_choices_are_upstreams_and_said():
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router_replay import RouterReplay

    logits = worker.random_logits()
    replay = RouterReplay()
    try:
        (ours, _), (plain, _) = (
            moe_utils.topk_routing_with_score_function(logits, 4, fused=fused, router_replay=replay)
            for fused in (True, False)
        )
    finally:
        RouterReplay.global_router_replay_instances.remove(replay)
    assert torch.equal(ours, plain)
    assert dispatch.fallbacks["moe-router-fusion", "expert choices are replayed"] >= 1
