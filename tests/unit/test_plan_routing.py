"""The experts that the tokens of a planned rank go to: each has its number, and ours have their share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.planning import command
from megatron_npu.planning.job import Job
from megatron_npu.planning.rank import routing
from megatron_npu.planning.rank.routing import Routing


@pytest.mark.parametrize("own", [(0, 2), (4, 6), (0, 8)], ids=str)
@pytest.mark.parametrize("multiple", [0.0, 1.0, 1.7, 100.0])
def test_each_token_has_its_experts_and_ours_their_share(own: tuple[int, int], multiple: float) -> None:
    shares = Routing(8, 3, own)
    found = shares.map(64, multiple)
    assert found.sum(1).tolist() == [3] * 64
    per_expert = found.sum(0)
    count = own[1] - own[0]
    mine = int(per_expert[slice(*own)].sum())
    expected = min(multiple, shares.most) * 64 * 3 * count / 8
    assert mine == 192 if count == 8 else abs(mine - expected) <= 1
    for part in (per_expert[slice(*own)], torch.cat([per_expert[: own[0]], per_expert[own[1] :]])):
        assert not part.numel() or int(part.max() - part.min()) <= 1


def test_the_largest_multiple() -> None:
    assert Routing(8, 2, (0, 1)).most == 4  # each token comes to the one expert
    assert Routing(8, 2, (0, 4)).most == 2
    assert Routing(8, 2, (0, 8)).most == 1
    assert Routing(8, 2, (0, 1), capacity=1.5).most == 1.5


class TopKRouter(torch.nn.Module):
    def __init__(self, **config: object) -> None:
        super().__init__()
        defaults = {"num_moe_experts": 4, "moe_router_topk": 1, "moe_pad_expert_input_to_capacity": False}
        self.config = SimpleNamespace(**(defaults | config))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens, torch.zeros(tokens.size(0), 4, dtype=torch.bool)


def test_a_router_chooses_as_said_but_where_its_capacity_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(
        get_expert_model_parallel_world_size=lambda: 2, get_expert_model_parallel_rank=lambda: 1
    )
    monkeypatch.setitem(routing.sys.modules, "megatron.core.parallel_state", state)
    report: dict = {}
    with routing.chosen(1.5, report):
        assert TopKRouter()(torch.ones(8, 2))[1].sum(0).tolist() == [1, 1, 3, 3]
        padded = TopKRouter(moe_pad_expert_input_to_capacity=True)
        assert not padded(torch.ones(8, 2))[1].any()
    assert report == {"routing_most": 2.0}
    assert not TopKRouter()(torch.ones(8, 2))[1].any()


def test_what_fake_tensors_do_not_cover_is_refused() -> None:
    words = "--num-experts 4 --micro-batch-size 1".split()
    free = Job.of(2, ["pretrain", *words])
    command.require_covered(free, "cuda")
    old = replace(free, family="megatron_lm")
    with pytest.raises(UsageError, match="--device cuda does not support the experts of megatron_lm"):
        command.require_covered(old, "cuda")
    command.require_covered(old, "npu")
    padded = [*words, "--moe-pad-expert-input-to-capacity"]
    command.require_covered(Job.of(2, ["pretrain", *padded]), "cuda")
    with pytest.raises(UsageError, match="--device cuda does not support train"):
        command.require_covered(Job.of(2, ["train"]), "cuda")
