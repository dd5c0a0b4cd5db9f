"""Support ``--moe-router-fusion`` without TransformerEngine, by routing in a single autograd function.

Patches the three functions in ``moe.moe_utils`` that would call TransformerEngine's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, transformer_engine_present
from megatron_npu.ops import dispatch
from megatron_npu.ops.experts.expert_routing import Routing, balancing_loss, route_tokens, routing_scores

_UTILS = "megatron.core.transformer.moe.moe_utils"
_fused = partial(
    around,
    versions=">=0.14",  # which has the flag
    condition=transformer_engine_present,
    why=(
        "--moe-router-fusion requires TransformerEngine's kernels; without fusion, the selection, the "
        "weights and their gradients take about 30 operations"
    ),
)
# What fused kernels have no place for: 0.16's replay, 0.17's dense results, 0.19's experts chosen before; in
# upstream's order, behind ``fused``.
_NOT_FUSED = {
    "router_replay": "expert choices are replayed",
    "dense_output": "inference requests the expert indices",
    "precomputed_indices": "the experts have already been chosen",
}


@_fused(f"{_UTILS}:topk_routing_with_score_function")
def route(
    original: Callable[..., tuple[Tensor, Tensor]],
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the weights and the routing map of the selected experts, each ``[t, e]``, from logits ``[t,
    e]``.
    """
    if fused:
        asked = dict(zip(_NOT_FUSED, rest, strict=False)) | more
        reason = next((why for name, why in _NOT_FUSED.items() if _is_given(asked.get(name))), None)
        if reason is None:
            groups = (num_groups or 0, group_topk) if group_topk else (0, 0)
            routing = Routing(topk, score_function, use_pre_softmax, *groups, scaling_factor or 1.0)
            return route_tokens(logits, routing, expert_bias)
        dispatch.report_fallback("moe-router-fusion", reason, "is ignored", "Remove --moe-router-fusion")
    return original(
        logits,
        topk,
        use_pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        score_function,
        expert_bias,
        False,
        *rest,
        **more,
    )


def _is_given(value: Any) -> bool:
    """Return True if an argument, possibly a tensor, is neither None nor False."""
    return value is not None and value is not False


@_fused(f"{_UTILS}:compute_routing_scores_for_aux_loss")
def scores_for_aux_loss(
    original: Callable[..., tuple[Tensor, Tensor]],
    logits: Tensor,
    topk: int,
    score_function: str,
    fused: bool = False,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the routing map of the top experts and all scores, each ``[t, e]``, from logits ``[t, e]``.

    Padding tokens have no experts.
    """
    if not fused:
        return original(logits, topk, score_function, False, *rest, **more)
    scores, chosen = routing_scores(logits, topk, score_function)
    padding: Tensor | None = rest[0] if len(rest) > 0 else more.get("padding_mask")
    if padding is None:
        return chosen, scores
    valid = (~padding).unsqueeze(-1)
    return chosen * valid, scores * valid


@_fused(f"{_UTILS}:switch_load_balancing_loss_func")
def load_balancing_loss(
    original: Callable[..., Tensor],
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """Compute the scalar load-balancing loss from scores ``[t, e]`` and token counts ``[e]``."""
    if not fused:
        return original(
            probs,
            tokens_per_expert,
            total_num_tokens,
            topk,
            num_experts,
            moe_aux_loss_coeff,
            False,
            *rest,
            **more,
        )
    valid: Tensor | None = (
        rest[0] if len(rest) > 0 else more.get("padding_mask")
    )  # the other way round than of the scores
    if valid is not None:
        probs = probs * valid.unsqueeze(-1)
    factor = num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens)
    return balancing_loss(probs, tokens_per_expert, factor)
