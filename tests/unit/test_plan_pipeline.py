"""The idle time of a pipeline: the recorded order of passes, and what ``plan --search`` makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.planning import pipeline
from megatron_npu.planning.estimate import Estimate
from megatron_npu.planning.hardware import HARDWARE
from megatron_npu.planning.job import Job
from megatron_npu.planning.layouts import Layout
from megatron_npu.planning.pipeline import BACKWARD, FORWARD, Order
from megatron_npu.planning.rank import measurements
from megatron_npu.planning.search import DryRun, Found, Search
from megatron_npu.planning.shape import Shape

STAGES, BATCHES = 4, 8


def plain(stage: int, batches: int = BATCHES) -> Order:
    """1F1B: as many forward passes as there are later stages, then one of each in turn."""
    return _alternating(stage, [(0, batch) for batch in range(batches)], STAGES - 1 - stage, 1)


def interleaved(stage: int, chunks: int = 2) -> Order:
    """Megatron's interleaved schedule: groups of ``STAGES`` micro batches pass through each chunk in turn."""
    listed = [
        (chunk, first + each)
        for first in range(0, BATCHES, STAGES)
        for chunk in range(chunks)
        for each in range(STAGES)
    ]
    return _alternating(stage, listed, 2 * (STAGES - 1 - stage) + (chunks - 1) * STAGES, chunks)


def _alternating(stage: int, listed: list[tuple[int, int]], warm: int, chunks: int) -> Order:
    back = [(BACKWARD, chunks - 1 - chunk, batch) for chunk, batch in listed]
    ahead = [(FORWARD, chunk, batch) for chunk, batch in listed]
    order = ahead[:warm]
    for forward, backward in zip(ahead[warm:], back, strict=False):
        order += [forward, backward]
    return order + back[len(ahead) - warm :]


def seconds(slow: Callable[[int, int], float] = lambda stage, chunk: 1.0) -> Callable[[str, int, int], float]:
    return lambda kind, stage, chunk: (1.0 if kind == FORWARD else 2.0) * slow(stage, chunk)


@pytest.mark.parametrize(("order", "chunks"), [(plain, 1), (interleaved, 2)])
def test_the_bubble_of_equal_stages_is_the_known_one(order: Callable[[int], Order], chunks: int) -> None:
    span = pipeline.span([order(stage) for stage in range(STAGES)], seconds())
    busy = 3.0 * BATCHES * chunks
    assert span is not None
    assert span / busy - 1 == pytest.approx((STAGES - 1) / (BATCHES * chunks))


@pytest.mark.parametrize("slow", range(STAGES))
def test_an_unequal_stage_makes_the_others_wait(slow: int) -> None:
    orders = [plain(stage) for stage in range(STAGES)]
    span = pipeline.span(orders, seconds(lambda stage, chunk: 1.5 if stage == slow else 1.0))
    assert span is not None
    busy = 3.0 * BATCHES * (STAGES + 0.5) / STAGES
    assert span / busy - 1 > (STAGES - 1) / BATCHES
    assert span >= 3.0 * BATCHES * 1.5


def test_orders_that_do_not_fit_together_are_not_timed() -> None:
    orders = [plain(stage) for stage in range(STAGES)]
    assert pipeline.span([*orders[:-1], orders[-1][:-1]], seconds()) is None
    assert pipeline.span([orders[0][::-1], *orders[1:]], seconds()) is None  # waits for itself
    assert pipeline.span([*orders[:-1], plain(3, BATCHES + 1)], seconds()) is None


def test_a_rank_records_its_passes_and_forgets_them_at_an_update() -> None:
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with measurements.taken("cpu", lambda: 0) as noted:
        for batches in (1, 2):
            outputs = [module(torch.ones(2)).sum() for _ in range(batches) for module in (first, second)]
            for output in outputs[::-1]:
                output.backward()
            optimizer.step()
    ahead = [(FORWARD, chunk, batch) for batch in range(2) for chunk in range(2)]
    assert noted.order == ahead + [(BACKWARD, chunk, batch) for _, chunk, batch in ahead[::-1]]


WORDS = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 "
    "--global-batch-size 8 --micro-batch-size 1"
)
JOB = Job.of(STAGES, ["pretrain", *WORDS.split()])


def estimate(chunks: int, **changes: int) -> Estimate:
    layout = Layout(1, STAGES, chunks, 1, 1, 1, 1, BATCHES, recomputed="none", shared=False)
    return Estimate(replace(Shape.of(JOB), **changes), layout, HARDWARE["ascend-910b"], 8)


@pytest.mark.parametrize(("order", "chunks"), [(plain, 1), (interleaved, 2)])
def test_an_estimate_waits_as_the_order_says(order: Callable[[int], Order], chunks: int) -> None:
    orders = [order(stage) for stage in range(STAGES)]
    equal = estimate(chunks, vocabulary=0)  # then the last stage is like the others
    time, formula = equal.time(orders), equal.time()
    assert (time.recorded, formula.recorded) == (True, False)
    assert time.total == pytest.approx(formula.total)
    idle = time.waiting / (time.computing + time.sending)
    assert idle == pytest.approx((STAGES - 1) / (BATCHES * chunks))
    unequal = estimate(chunks).time(orders)
    assert unequal.waiting / (unequal.computing + unequal.sending) > idle
    assert not estimate(chunks).time(orders[:-1]).recorded


def test_micro_batches_that_were_not_run_take_the_slowest_stage_its_time() -> None:
    many = estimate(1)
    few = [plain(stage) for stage in range(STAGES)]
    whole = replace(many, layout=replace(many.layout, micro_batches=3 * BATCHES))
    all_ = [plain(stage, 3 * BATCHES) for stage in range(STAGES)]
    assert whole.time(few).total == pytest.approx(whole.time(all_).total)


def test_a_table_says_which_waits_come_from_the_formula() -> None:
    search = Search(JOB, 64 << 30, 8, "ascend-910b", 1)
    orders = tuple(plain(stage) for stage in range(STAGES))
    without, recorded = (Found(estimate(1), DryRun(1 << 30, orders=each)) for each in (None, orders))
    assert (without.wait_is_formula, recorded.wait_is_formula) == (True, False)
    said = "\n".join(search._lines([without], 1, 1))
    assert "%* " in said
    assert "no order was recorded" in said
    said = "\n".join(search._lines([recorded], 1, 1))
    assert "*" not in said
    sources = [each["waiting_from"] for each in search.to_json([without, recorded])["layouts"]]
    assert sources == ["formula", "recorded order"]


def test_a_search_writes_no_page_and_no_timeline(tmp_path: Path) -> None:
    for flag in ("--html", "--timeline"):
        words = ["--devices", "4", "--search", flag, str(tmp_path / "file"), "--", "pretrain", *WORDS.split()]
        assert cli.main(["plan", *words]) == 2
    with pytest.raises(UsageError, match="--search"):
        Shape.of(Job.of(1, ["train"]))


def test_json_of_a_search_is_read_again() -> None:
    search = Search(JOB, 64 << 30, 8, "ascend-910b", 2)
    found, _ = search.run(lambda job: DryRun(1 << 30))
    listed = json.loads(json.dumps(search.to_json(found)))["layouts"]
    assert [each["fits"] for each in listed] == [True, True]
    totals = [each["estimate"]["total"] for each in listed]
    assert totals == sorted(totals)
