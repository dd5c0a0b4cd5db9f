"""The router of a mixture of experts against formulas in fp64, its choice against plain sorting."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_npu.ops.experts.expert_routing import Routing, balancing_loss, route_tokens, routing_scores
from tests.ops.against_fp64 import RELAXED, check

SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}
routings = st.builds(
    Routing,
    topk=st.sampled_from([2, 4]),
    score=st.sampled_from(list(SCORES)),
    before=st.booleans(),
    groups=st.just(4),
    chosen_groups=st.sampled_from([0, 2]),
    scale=st.sampled_from([1.0, 2.5]),
)


def distinct_logits(tokens: int, experts: int, seed: int) -> Tensor:
    """Return ``[t, e]`` without two equal ones in a row, in any dtype: rounding decides about no choice."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(experts)
    values = steps * 0.37 + steps**2 * 0.013 - 3
    return torch.stack([values[torch.randperm(experts, generator=generator)] for _ in range(tokens)])


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def choice(preference: Tensor, routing: Routing) -> Tensor:
    """Return which experts are chosen, by sorting."""
    chosen = torch.zeros_like(preference, dtype=torch.bool)
    for token, values in enumerate(preference.tolist()):
        allowed = list(range(len(values)))
        if routing.chosen_groups:
            size, counted = len(values) // routing.groups, routing.topk // routing.chosen_groups
            members = [allowed[g * size : (g + 1) * size] for g in range(routing.groups)]
            worth = [sum(sorted((values[i] for i in each), reverse=True)[:counted]) for each in members]
            allowed = [i for group in best(worth, routing.chosen_groups) for i in members[group]]
        chosen[token, [allowed[i] for i in best([values[i] for i in allowed], routing.topk)]] = True
    return chosen


def formula(routing: Routing, bias: Tensor | None = None):
    """Return weights as a function of fp64 logits."""

    def weigh(logits: Tensor) -> Tensor:
        softmax = routing.score == "softmax"
        scores = logits if softmax and not routing.before else SCORES[routing.score](logits)
        preference = scores if softmax or bias is None else scores + bias.double()
        chosen = choice(preference.detach(), routing)
        if softmax and not routing.before:
            weights = scores.masked_fill(~chosen, float("-inf")).softmax(-1)
        else:
            weights = scores * chosen
            if not softmax and routing.topk > 1:
                weights = weights / weights.sum(-1, keepdim=True)
        return weights * routing.scale

    return weigh


@RELAXED
@given(routings, st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_weights_and_their_gradient(device, dtype, routing, tokens, biased, seed):
    logits = distinct_logits(tokens, 16, seed)
    bias = torch.linspace(-0.2, 0.31, 16) if biased else None
    on_device = None if bias is None else bias.to(device)
    check(
        lambda x: route_tokens(x, routing, on_device)[0],
        formula(routing, bias),
        (logits.to(device),),
        dtype,
    )
    rounded = logits.to(dtype)
    weights, chosen = route_tokens(rounded.to(device), routing, on_device)
    right = formula(routing, bias)(rounded.double())
    assert torch.equal(chosen.cpu(), right != 0)
    assert torch.equal(weights.cpu() != 0, chosen.cpu())


@pytest.mark.parametrize("score", SCORES)
def test_one_expert_of_a_token(device, score):
    """Its weight is 1 after a softmax, and its score otherwise."""
    check(
        lambda x: route_tokens(x, Routing(1, score))[0],
        formula(Routing(1, score)),
        (distinct_logits(5, 8, 1).to(device),),
        torch.float32,
    )


@pytest.mark.parametrize("groups", [(8, 2), (2, 1)], ids=["small", "by four"])
def test_groups_that_a_kernel_may_not_take(device, groups):
    """Groups of two experts, and those that are ranked by four of them."""
    routing = Routing(4, "sigmoid", groups=groups[0], chosen_groups=groups[1])
    logits = distinct_logits(5, 16, 2).to(device)
    check(lambda x: route_tokens(x, routing)[0], formula(routing), (logits,), torch.float32)


@RELAXED
@given(st.sampled_from(list(SCORES)), st.integers(1, 6), st.integers(0, 99))
def test_scores_of_the_balancing_loss(device, dtype, score, tokens, seed):
    logits = distinct_logits(tokens, 8, seed)

    def expected(x):
        scores = SCORES[score](x)
        return scores / scores.sum(-1, keepdim=True)

    check(lambda x: routing_scores(x, 2, score)[0].to(dtype), expected, (logits.to(device),), dtype)
    scores, chosen = routing_scores(logits.to(dtype).to(device), 2, score)
    assert scores.dtype is torch.float32
    right = choice(logits.to(dtype).double(), Routing(2))
    assert torch.equal(chosen.cpu(), right)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_balancing_loss(device, as_tensor):
    counts = torch.tensor([3, 0, 5, 4])
    factor = torch.tensor(0.25, device=device) if as_tensor else 0.25
    check(
        lambda x: balancing_loss(x, counts.to(device), factor),
        lambda x: (x.sum(0) * counts).sum() * 0.25,
        (torch.rand(6, 4, device=device),),
        torch.float32,
    )


def test_no_tokens(device):
    logits = torch.zeros(0, 8, device=device, requires_grad=True)
    weights, chosen = route_tokens(logits, Routing(2, "sigmoid"))
    assert (weights.shape, chosen.shape) == ((0, 8), (0, 8))
    assert torch.autograd.grad(weights.sum(), logits)[0].shape == (0, 8)


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (Routing(9), "topk must be from 1 to e"),
        (Routing(2, "tanh"), "score must be softmax, sigmoid or sqrtsoftplus, but got"),
        (Routing(2, groups=3, chosen_groups=1), "of 3 groups"),
        (Routing(1, groups=4, chosen_groups=2), "2 of 4 groups"),
        (Routing(6, groups=4, chosen_groups=2), "6 experts cannot be selected from 2"),
    ],
)
def test_what_does_not_fit_is_refused(routing, said):
    with pytest.raises(ValueError, match=said):
        route_tokens(torch.zeros(3, 8), routing)
