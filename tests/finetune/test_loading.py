"""Batches of ranks, schedules and timers of ``train``: by themselves, without a model."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import default_collate

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.loading import Loader, Sampling
from megatron_npu.finetune.rapidformer import gathering, providers, state, templates
from megatron_npu.finetune.rapidformer.engine import RapidformerEngine
from megatron_npu.finetune.rapidformer.timers import Timers
from megatron_npu.finetune.run import schedule
from megatron_npu.finetune.run.flag_parts import RateFlags
from megatron_npu.finetune.run.ranks import Ranks

CPU = torch.device("cpu")


def noisy(samples: list[int]) -> torch.Tensor:
    """Return samples with what a collate function draws beside them, [b, 2]."""
    return torch.stack([torch.tensor([float(sample), torch.rand(()).item()]) for sample in samples])


def loader(ranks: int = 1, rank: int = 0, samples: int = 23, **options: Any) -> Loader:
    workers = options.pop("workers", 0)
    sampling = Sampling(**{"size": 2, "seed": 5, "place": Ranks(rank, rank, ranks)} | options)
    return Loader(list(range(samples)), noisy, sampling=sampling, device=CPU, workers=workers)


def steps(ranks: int, accumulated: int, epoch: int = 0) -> list[list[tuple[float, ...]]]:
    """Return the samples of each iteration of 8, whichever rank has them, with what was drawn."""
    parts = [list(loader(ranks, rank, shuffle=True, whole=4).batches(epoch)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {2 * accumulated}
    together = [
        [row for part in parts for batch in part[at : at + accumulated] for row in batch.tolist()]
        for at in range(0, 2 * accumulated, accumulated)
    ]
    return [sorted(map(tuple, rows)) for rows in together]


def test_an_iteration_has_the_same_samples_on_any_number_of_ranks() -> None:
    assert steps(1, 4) == steps(2, 2) == steps(4, 1)
    seen = [int(sample) for rows in steps(1, 4) for sample, _ in rows]
    assert len(set(seen)) == 16  # of 23: what does not fill a global batch is left out
    assert steps(1, 4, epoch=1) != steps(1, 4)


def test_an_epoch_goes_on_where_it_was_and_leaves_the_generators() -> None:
    whole = loader(shuffle=True, whole=4).forever()
    first = [next(whole) for _ in range(14)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    later = loader(shuffle=True, whole=4).forever(11)
    assert all(torch.equal(next(later), batch) for batch in first[11:])
    assert torch.equal(torch.get_rng_state(), before)
    of_workers = loader(shuffle=True, whole=4, workers=1).batches(0, 5)
    assert [batch.tolist() for batch in of_workers] == [batch.tolist() for batch in first[5:8]]


def test_an_evaluation_has_each_sample_once_and_draws_the_same_again() -> None:
    ranks = [loader(3, rank, samples=14, repeats=True) for rank in range(3)]
    batches = [list(one) for one in ranks]
    assert [len(part) for part in batches] == [3, 3, 3]
    last = torch.cat([part[-1] for part in batches])[:, 0].tolist()
    assert last == [12.0, 13.0, 13.0]  # the last sample again, so that each rank has one
    iterator = iter(ranks[0])
    remainders = [(next(iterator), ranks[0].remainder)[1] for _ in range(3)]
    assert remainders == [0, 0, 2]
    assert [batch.tolist() for batch in ranks[0]] == [batch.tolist() for batch in batches[0]]


def test_data_that_stream_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the dataset must have a length .* but it is a generator"):
        Loader((number for number in range(3)), sampling=Sampling(1, Ranks()), device=CPU)


def test_what_ranks_have_is_filled_up_to_the_longest() -> None:
    labels, logits = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3)
    assert gathering._filled(labels, [2, 4])[:, 3].tolist() == [-100, -100]
    assert gathering._filled(logits, [3, 3])[2].tolist() == [0.0, 0.0, 0.0]
    assert gathering.gather(torch.tensor(3.0), 1).tolist() == [3.0]


def test_the_schedule_is_that_of_transformers() -> None:
    flags = {"lr": 0.1, "lr_warmup_iters": 4, "lr_warmup_fraction": None, "train_iters": 20}
    rising = RateFlags(**flags, lr_decay_style="linear", min_lr=0.0, lr_decay_iters=None)
    linear = transformers.get_linear_schedule_with_warmup
    assert rates(schedule.scheduler_fn(rising)) == pytest.approx(rates(partial(linear, num_warmup_steps=4)))
    cosine = partial(transformers.get_cosine_with_min_lr_schedule_with_warmup, min_lr=0.02)
    waving = RateFlags(**flags, lr_decay_style="cosine", min_lr=0.02, lr_decay_iters=15)
    ours, theirs = rates(schedule.scheduler_fn(waving)), rates(partial(cosine, num_warmup_steps=4), 15)
    assert ours[:16] == pytest.approx(theirs[:16])
    assert ours[16:] == [pytest.approx(0.02)] * 4
    fraction = replace(waving, lr_warmup_iters=0, lr_warmup_fraction=0.2)
    assert schedule.warmup_iterations(fraction) == 3  # of the 15 iterations of the decay


def rates(scheduler_fn: Any, steps: int = 20) -> list[float]:
    """Return the learning rates of 20 iterations; a schedule of Transformers is told how many it has."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    told = {"num_training_steps": steps} if isinstance(scheduler_fn, partial) else {}
    scheduler, found = scheduler_fn(optimizer, **told), []
    for _ in range(20):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_timers_add_up(capsys) -> None:
    timers = Timers()
    for _ in range(2):
        timers("forward", log_level=0).start()
        timers("forward").stop()
    with pytest.raises(RuntimeError, match="'forward' has not been started"):
        timers("forward").stop()
    assert 0 < timers("forward").elapsed(reset=False) == timers("forward").elapsed(reset=False)
    timers.log(["forward", "unknown"])
    assert capsys.readouterr().out.startswith(" time (ms) | forward: ")
    assert timers("forward").elapsed() == 0.0


def test_a_logger_of_rank_0_says_more(capsys) -> None:
    try:
        for rank, level in ((0, logging.INFO), (1, logging.WARNING)):
            state.set_args(Namespace(rank=rank, log_level="info"))
            assert state.get_args().rank == rank
            assert state.get_logger("data").getEffectiveLevel() == level
    finally:
        state.set_args(None)
    with pytest.raises(
        UsageError, match=r"get_args\(\) can only be called in a process that `megatron-npu train` started"
    ):
        state.get_args()


def test_dynamic_shape_pads_the_batches_of_training_too() -> None:
    """Of 3 to 17 tokens; the lengths that there are then are few."""
    one = RapidformerEngine.__new__(RapidformerEngine)  # alone, without a group
    one.args = Namespace(
        **{"rank": 0, "local_rank": 0, "world_size": 1, "seed": 1, "num_workers": 0, "log_level": "warning"},
        **{"micro_batch_size": 1, "global_batch_size": 1, "dynamic_shape": True, "seq_length": None},
    )
    one.device, one._told_lengths = CPU, False
    samples = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in range(3, 18)]
    data = providers.Datasets(samples, None, None, default_collate)
    batches = templates.Finetuner(one)._training_loader(data, shuffle=False)
    assert {batch["input_ids"].shape[1] for batch in batches} == {16, 24}
    one.args.dynamic_shape = False
    batches = templates.Finetuner(one)._training_loader(data, shuffle=False)
    assert len({batch["input_ids"].shape[1] for batch in batches}) == len(samples)
