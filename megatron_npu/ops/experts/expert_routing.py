"""Compute the routing of a mixture of experts: select experts for each token, and weight them.

Source: ``topk_routing_with_score_function``, ``compute_routing_scores_for_aux_loss`` and
``switch_load_balancing_loss_func`` of megatron-core (``transformer/moe/moe_utils.py``, 0.19.2), unfused.
Scores are computed in fp32 as in that version; versions before 0.18 round intermediate scores to the dtype of
the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.ops.dispatch import KERNEL_DTYPES, Make, Operation

_EPSILON = 1e-20  # added to the sum of scores that are divided by it


class Routing(NamedTuple):
    """Settings of a router that determine how experts are selected.

    Attributes:
        topk: the number of experts per token.
        score: "softmax", "sigmoid" or "sqrtsoftplus"; weights of the last two are normalized to sum to 1,
            unless a token has only one expert.
        before: whether softmax is computed over all experts before the choice, or over the chosen experts
            after it.
        groups, chosen_groups: experts are split into consecutive groups and chosen only from the groups whose
            best ``topk // chosen_groups`` experts have the largest sums. 0 means no groups.
        scale: the factor applied to the weights.
    """

    topk: int
    score: str = "softmax"
    before: bool = False
    groups: int = 0
    chosen_groups: int = 0
    scale: float = 1.0

    @property
    def counted(self) -> int:
        """The number of top experts whose scores are summed to obtain the score of a group."""
        return self.topk // self.chosen_groups if self.chosen_groups else 1


def route_tokens(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each token's weight for each expert (0 if the expert is not selected), and the selected experts.

    Args:
        logits: ``[t, e]``, fp32, bf16 or fp16.
        routing: how experts are chosen.
        bias: ``[e]``, added to sigmoid and sqrtsoftplus scores for the choice only; ignored with softmax.

    Returns:
        ``[t, e]`` in the dtype of ``logits``, and ``[t, e]`` bool with ``routing.topk`` True values per row.

    Raises:
        ValueError: the numbers of experts and groups do not match, or the score is unknown.
    """
    _check(logits, routing.topk, routing.score)
    groups, chosen = routing.groups or 0, routing.chosen_groups or 0
    fits = 0 < chosen <= groups and not logits.size(1) % groups and routing.topk // chosen > 0
    if chosen and not (fits and routing.topk <= chosen * (logits.size(1) // groups)):
        raise ValueError(
            f"{routing.topk} experts cannot be selected from {chosen} of {groups} groups with "
            f"{logits.size(1)} experts in total"
        )
    return _route(logits, routing, None if routing.score == "softmax" else bias)


def routing_scores(logits: Tensor, topk: int, score: str = "softmax") -> tuple[Tensor, Tensor]:
    """Return the scores for the load-balancing loss, which sum to 1 for each token, and the ``topk`` best
    experts.

    Args:
        logits: ``[t, e]``, fp32, bf16 or fp16.
        topk: the number of experts per token.
        score: see ``Routing``.

    Returns:
        ``[t, e]`` in fp32 (or wider), and ``[t, e]`` bool.

    Raises:
        ValueError: see ``route_tokens``.
    """
    _check(logits, topk, score)
    return _scores(logits, topk, score)


def balancing_loss(scores: Tensor, tokens_per_expert: Tensor, factor: float | Tensor) -> Tensor:
    """Return the load-balancing loss ``factor * sum(scores * tokens_per_expert)``, a scalar.

    Args:
        scores: ``[t, e]``, from ``routing_scores``.
        tokens_per_expert: ``[e]``, of any dtype; gets no gradient.
        factor: a number, or a scalar tensor.
    """
    return _loss(scores, tokens_per_expert, factor)


def _check(logits: Tensor, topk: int, score: str) -> None:
    if score not in ("softmax", *_ELEMENTWISE):
        raise ValueError(f"score must be softmax, sigmoid or sqrtsoftplus, but got {score!r}")
    if logits.dim() != 2 or not 0 < topk <= logits.size(1):
        raise ValueError(
            "logits must have shape [t, e] and topk must be from 1 to e, but got shape "
            f"{tuple(logits.shape)} and topk={topk}"
        )


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return F.softplus(logits).sqrt()


_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


# --- the reference ---


def _best_in_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Return ``scores`` with -inf for experts outside the selected groups."""
    grouped = scores.unflatten(1, (routing.groups, -1))
    worth = grouped.topk(routing.counted, dim=-1).values.sum(-1)
    best = torch.zeros_like(worth, dtype=torch.bool).scatter(
        1, worth.topk(routing.chosen_groups, dim=-1).indices, True
    )
    return grouped.masked_fill(~best.unsqueeze(-1), float("-inf")).flatten(1)


def _route_reference(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    precise = logits.to(_wide(logits))
    scores = precise
    if routing.score != "softmax":
        scores = _ELEMENTWISE[routing.score](precise)
    elif routing.before:
        scores = precise.softmax(-1)
    preference = scores.detach() if bias is None else scores.detach() + bias
    if routing.chosen_groups:
        preference = _best_in_groups(preference, routing)
    chosen = preference.topk(routing.topk, dim=1).indices
    weights = scores.gather(1, chosen)
    if routing.score == "softmax":
        weights = weights if routing.before else weights.softmax(-1)
    elif routing.topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
    weights = (weights * routing.scale).to(logits.dtype)
    chosen_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return torch.zeros_like(logits).scatter(1, chosen, weights), chosen_map


def _scores_reference(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    precise = logits.to(_wide(logits))
    if score == "softmax":
        scores = precise.softmax(-1)
    else:
        scores = _ELEMENTWISE[score](precise)
        scores = scores / (scores.sum(-1, keepdim=True) + _EPSILON)
    chosen = scores.detach().topk(topk, dim=1).indices
    return scores, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def _loss_reference(scores: Tensor, tokens_per_expert: Tensor, factor: float | Tensor) -> Tensor:
    return (scores.sum(0) * tokens_per_expert).sum() * factor


_route = Operation("route_tokens", _route_reference, group="expert_routing")
_scores = Operation("routing_scores", _scores_reference, group="expert_routing")
_loss = Operation("balancing_loss", _loss_reference, group="expert_routing")


# --- every device ---


@lru_cache_tensors(maxsize=6)  # three kinds, of the layers of a model and of its evaluation; never written
def _full(shape: torch.Size, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def _choose(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the scores and the indices of the selected experts, with the best expert first."""
    if routing.chosen_groups:
        grouped = scores.unflatten(1, (routing.groups, -1))
        worth = (
            grouped.topk(routing.counted, dim=-1).values.sum(-1) if routing.counted > 1 else grouped.amax(-1)
        )
        best = worth.topk(routing.chosen_groups, dim=-1, sorted=False).indices
        outside = _full(worth.shape, float("-inf"), worth.dtype, worth.device)
        scores = grouped.add(outside.scatter(1, best, 0.0).unsqueeze(-1)).flatten(1)
    chosen = scores.topk(routing.topk, dim=1)
    return chosen.values, chosen.indices


def _map_of(chosen: Tensor, logits: Tensor) -> Tensor:
    return _full(logits.shape, False, torch.bool, logits.device).scatter(1, chosen, True)


class _SoftmaxOfChosen(torch.autograd.Function):
    """Softmax over the logits of the selected experts, with the gradient of a softmax over all experts."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        values, chosen = _choose(logits, routing)
        nothing = _full(logits.shape, 0.0, logits.dtype, logits.device)
        weights = nothing.scatter(1, chosen, values.softmax(-1))
        chosen_map = _map_of(chosen, logits)
        ctx.save_for_backward(weights)
        ctx.mark_non_differentiable(chosen_map)
        return weights, chosen_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad.contiguous(), weights, -1, weights.dtype), None


class _Scores(torch.autograd.Function):
    """Normalized sigmoid or sqrtsoftplus scores, either of the selected experts or of all experts.

    With the weights w = s / sum(s), grad_x = w (grad - sum(w grad)) s'/s: softmax's gradient, times a factor.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, routing: Routing, bias: Tensor | None, all_of_them: bool
    ) -> tuple[Tensor, Tensor]:
        precise = logits.to(_wide(logits))
        scores = _ELEMENTWISE[routing.score](precise)
        _, chosen = _choose(scores if bias is None else scores + bias, routing)
        chosen_map = _map_of(chosen, logits)
        weights = scores if all_of_them else scores * chosen_map
        ctx.normalised = all_of_them or routing.topk > 1
        if ctx.normalised:
            weights = weights / weights.sum(-1, keepdim=True).add_(_EPSILON)
        ctx.save_for_backward(weights, scores, precise if routing.score == "sqrtsoftplus" else None)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(chosen_map)
        return weights.to(_wide(logits) if all_of_them else logits.dtype), chosen_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        weights, scores, precise = ctx.saved_tensors
        grad = grad.contiguous().to(weights.dtype)
        if ctx.normalised:
            result = torch._softmax_backward_data(grad, weights, -1, weights.dtype)
        else:
            result = grad * weights
        if precise is None:
            result = torch.addcmul(result, result, scores, value=-1)  # s' / s = 1 - s
        else:  # s = sqrt(y): s' / s = y' / 2y
            result.mul_(precise.sigmoid()).div_(scores.square().mul_(2))
        return result.to(ctx.dtype), None, None, None


def _route_torch(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if routing.score != "softmax":
        weights, chosen_map = _Scores.apply(logits, routing, bias, False)
    elif routing.before:
        scores = logits.to(_wide(logits)).softmax(-1)
        chosen_map = _map_of(_choose(scores.detach(), routing)[1], logits)
        weights = (scores * chosen_map).to(logits.dtype)
    else:
        weights, chosen_map = _SoftmaxOfChosen.apply(logits, routing)
    return _scaled(weights, routing), chosen_map


def _scaled(weights: Tensor, routing: Routing) -> Tensor:
    return weights if routing.scale == 1 else weights * routing.scale


def _scores_torch(logits: Tensor, topk: int, score: str) -> tuple[Tensor, Tensor]:
    if score != "softmax":
        return _Scores.apply(logits, Routing(topk, score), None, True)
    scores = logits.to(_wide(logits)).softmax(-1)
    return scores, _map_of(scores.detach().topk(topk, dim=1).indices, logits)


def _loss_torch(scores: Tensor, tokens_per_expert: Tensor, factor: float | Tensor) -> Tensor:
    weights = tokens_per_expert * factor  # before the product: what comes back is one product, too
    return torch.dot(scores.sum(0), weights.to(scores.dtype))


_route.on("cpu", "cuda", note="one backward pass for selection, weights and their sum")(_route_torch)
_scores.on("cpu", "cuda", "npu", note="as `route_tokens`")(_scores_torch)
_loss.on("cpu", "cuda", "npu", note="`torch.dot`")(_loss_torch)


# --- npu ---

# Limits of npu_moe_gating_top_k (torch_npu 2.13): experts, and experts once each group is filled up to 32s
_NPU_EXPERTS, _NPU_ALIGNED = 2048, 32


def _kernel_takes(logits: Tensor, routing: Routing) -> bool:
    """Return True if ``npu_moe_gating_top_k`` supports this router. Torch's operations are used otherwise."""
    experts, groups = logits.size(1), routing.groups if routing.chosen_groups else 1
    each = experts // groups
    scored = routing.before if routing.score == "softmax" else routing.score == "sigmoid" and routing.topk > 1
    return (
        scored
        and logits.dtype in KERNEL_DTYPES
        and logits.numel() > 0
        and routing.counted <= 2
        and each > 2
        and -(-each // _NPU_ALIGNED) * _NPU_ALIGNED * groups <= _NPU_EXPERTS
    )


def _gate(logits: Tensor, routing: Routing, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights ``[t, topk]``, selected experts (int32 ``[t, topk]``) and scores (fp32 ``[t, e]``)."""
    import torch_npu

    groups = {}
    if routing.chosen_groups:
        groups = {
            "k_group": routing.chosen_groups,
            "group_count": routing.groups,
            "group_select_mode": routing.counted - 1,  # by the best one, or by two
        }
    scale = routing.scale if kind else 1.0
    return torch_npu.npu_moe_gating_top_k(
        logits,
        routing.topk,
        bias=bias,
        norm_type=kind,
        out_flag=True,
        routed_scaling_factor=scale,
        eps=_EPSILON,
        **groups,
    )


class _SoftmaxByKernel(torch.autograd.Function):
    """Compute the scores and the selected experts with a kernel that differentiates only sigmoid scores."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        _, chosen, scores = _gate(logits, routing, None, 0)
        ctx.save_for_backward(scores)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(chosen)
        return scores, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad.contiguous(), scores, -1, scores.dtype).to(ctx.dtype), None


@_route.on(
    "npu", note="`npu_moe_gating_top_k`; softmax over the selected experts and sqrtsoftplus: as on cpu"
)
def _route_npu(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _kernel_takes(logits, routing):
        return _route_torch(logits, routing, bias)
    if routing.score == "softmax":
        scores, chosen = _SoftmaxByKernel.apply(logits, routing)
        chosen_map = _map_of(chosen, logits)
        return _scaled((scores * chosen_map).to(logits.dtype), routing), chosen_map
    precise = logits if bias is None else logits.to(bias.dtype)  # which the kernel wants to be the same
    weights, chosen, _ = _gate(precise, routing, bias, 1)
    nothing = _full(logits.shape, 0.0, weights.dtype, logits.device)
    return nothing.scatter(1, chosen, weights).to(logits.dtype), _map_of(chosen, logits)


@_route.example()
def _example(make: Make) -> Tensor:
    return route_tokens(make(16, 8), Routing(2))[0]


@_route.example("sigmoid")
def _sigmoid_example(make: Make) -> Tensor:
    return route_tokens(make(16, 8), Routing(4, "sigmoid", groups=2, chosen_groups=2, scale=2.5))[0]


@_scores.example()
def _scores_example(make: Make) -> Tensor:
    return routing_scores(make(16, 8), 2)[0]


@_loss.example()
def _loss_example(make: Make) -> Tensor:
    scores = make(16, 8)
    return balancing_loss(scores, torch.full((8,), 4, device=scores.device), 0.5)
