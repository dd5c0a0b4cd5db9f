"""The router with --moe-router-fusion against upstream's own without it, of the megatron-core on the path.

Run as a module it compares them all, of any version that has the flag (0.14 on):

    python -m tests.adaptors.megatron_core.expert_routing_worker
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.experts import expert_routing as adaptor
from megatron_npu.ops import dispatch
from tests.support.comparison import here, same_gradients

EXPERTS, TOPK = 16, 4
# arguments of topk_routing_with_score_function
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax before": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "softmax before, groups": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 4},
    "softmax of the chosen, groups": {"num_groups": 4, "group_topk": 2},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, groups, bias": {
        **{"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
        "expert_bias": torch.linspace(-0.3, 0.4, EXPERTS),
    },
    "sqrtsoftplus, bias": {
        "score_function": "sqrtsoftplus",
        "expert_bias": torch.linspace(-0.3, 0.4, EXPERTS),
    },
}


def random_logits() -> Tensor:
    """Return ``[24, 16]`` fp32 logits, in which no two of a token are equal."""
    return torch.randn(24, EXPERTS, generator=torch.Generator().manual_seed(1)).to(here()).requires_grad_()


def known(router: dict[str, Any]) -> bool:
    """Return whether upstream's function has the scores: sqrtsoftplus came with 0.18."""
    from megatron.core.transformer.moe import moe_utils

    original = inspect.unwrap(moe_utils.topk_routing_with_score_function)
    return router.get("score_function", "softmax") in ("softmax", "sigmoid") or (
        "sqrtsoftplus" in inspect.getsource(original)
    )


def _parameters() -> Collection[str]:
    """Return the names of the arguments of upstream's function."""
    from megatron.core.transformer.moe import moe_utils

    return inspect.signature(moe_utils.topk_routing_with_score_function).parameters


def compare_routers(router: dict[str, Any]) -> None:
    """Compare weights, their gradients and the chosen experts."""
    from megatron.core.transformer.moe import moe_utils

    logits = random_logits()
    moved = {name: value.to(here()) if isinstance(value, Tensor) else value for name, value in router.items()}
    with mock.patch.object(adaptor, "route_tokens", wraps=adaptor.route_tokens) as operation:
        (ours, chosen), (plain, right) = (
            moe_utils.topk_routing_with_score_function(logits, TOPK, **moved, fused=fused)
            for fused in (True, False)
        )
    assert operation.call_count == 1
    assert torch.equal(chosen, right)
    same_gradients(ours, plain, [logits])


def compare_losses(score: str) -> None:
    """Compare scores, counts and the loss that balances them, all with their gradients."""
    from megatron.core.transformer.moe import moe_utils

    logits = random_logits()
    (chosen, ours), (right, plain) = (
        moe_utils.compute_routing_scores_for_aux_loss(logits, TOPK, score, fused=fused)
        for fused in (True, False)
    )
    assert torch.equal(chosen, right)
    same_gradients(ours, plain, [logits])
    leaves = ours.detach().requires_grad_()
    losses = [
        moe_utils.switch_load_balancing_loss_func(leaves, right.sum(0), 24, TOPK, EXPERTS, 0.3, fused=fused)
        for fused in (True, False)
    ]
    same_gradients(*losses, [leaves])


def compare_chosen_before() -> None:
    """Give the experts that are chosen already, as 0.19's quantile balancing does: not fused, and said."""
    from megatron.core.transformer.moe import moe_utils

    logits = random_logits()
    chosen_before = (logits + torch.linspace(-1, 1, EXPERTS, device=here())).topk(TOPK, dim=1).indices
    (ours, chosen), (plain, right) = (
        moe_utils.topk_routing_with_score_function(
            logits, TOPK, fused=fused, precomputed_indices=chosen_before
        )
        for fused in (True, False)
    )
    assert torch.equal(chosen, right)
    assert torch.equal(chosen.nonzero()[:, 1].view(-1, TOPK), chosen_before.sort(dim=1).values)
    same_gradients(ours, plain, [logits])
    assert dispatch.fallbacks["moe-router-fusion", "the experts have already been chosen"] == 1


def main() -> None:
    """Compare all of them."""
    import megatron_npu

    megatron_npu.install()
    compared = [router for router in ROUTERS.values() if known(router)]
    for router in compared:
        compare_routers(router)
    scores = sorted({router.get("score_function", "softmax") for router in compared})
    for score in scores:
        compare_losses(score)
    if "precomputed_indices" in _parameters():
        compare_chosen_before()
    print(f"{len(compared)} routers and {len(scores)} scores are alike")


if __name__ == "__main__":
    main()
