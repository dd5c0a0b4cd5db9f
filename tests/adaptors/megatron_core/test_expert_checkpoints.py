"""What of a checkpoint is loaded with another expert parallelism."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_npu.adaptors.megatron_core.checkpointing import with_other_experts
from megatron_npu.errors import UsageError


def load(saved: Namespace, **now: object) -> Namespace:
    """Load a checkpoint with these arguments of the run; return what became of them."""
    values = {"finetune": False, "no_load_optim": False, "no_load_rng": False, **now}
    args = Namespace(**{**vars(run(1, 1)), **values})
    with_other_experts(lambda *_: ({"args": saved}, "name", False, None), "folder", args, True)
    return args


def run(experts: int, processes: int) -> Namespace:
    return Namespace(
        expert_model_parallel_size=experts,
        world_size=processes,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )


@pytest.mark.parametrize(("saved", "now", "left"), [((2, 2), (2, 2), False), ((2, 2), (2, 4), True)])
def test_random_states_of_other_ranks_are_left(saved, now, left):
    assert load(run(*saved), **vars(run(*now))).no_load_rng is left


@pytest.mark.parametrize(("saved", "now"), [((1, 1), (2, 2)), ((2, 2), (1, 1))])
def test_the_optimizer_of_spread_experts_is_refused(saved, now):
    with pytest.raises(UsageError, match="the weights fit"):
        load(run(*saved), **vars(run(*now)))
    assert load(run(*saved), **vars(run(*now)), no_load_optim=True).no_load_rng
    assert not load(run(*saved), **vars(run(*now)), finetune=True).no_load_rng
