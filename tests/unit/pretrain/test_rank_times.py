"""The ranks of a job by their own forward passes: who is slow, and when that is said."""

from __future__ import annotations

import json

import pytest

from megatron_npu.pretrain.report.dashboard.snapshot import Run
from megatron_npu.pretrain.report.slow_ranks import slow_ranks

rank_times = pytest.importorskip("megatron_npu.pretrain.report.rank_times")


def test_a_rank_is_compared_with_those_of_its_stage() -> None:
    assert slow_ranks([10.0, 10.0, 30.0, 31.0], [0, 0, 1, 1]) == {}
    assert slow_ranks([10.0, 10.0, 10.0, 20.0], [0, 0, 0, 0]) == {3: 2.0}
    assert slow_ranks([], [0, 0]) == {}  # nothing was measured


def test_a_slow_rank_is_named_once_with_its_machine(monkeypatch) -> None:
    monkeypatch.setattr(rank_times.dist, "get_world_size", lambda: 3)
    places = [rank_times.Place(f"node{rank}", 0) for rank in range(3)]
    monkeypatch.setattr(rank_times, "_places", lambda: places)
    times = rank_times.RankTimes(measures=True)
    slow, usual = [10.0, 10.0, 25.0], [10.0, 11.0, 10.0]
    assert times.slow(slow, 10) is None  # may be chance
    assert "rank 2 on node2 (25.0 ms, 2.5 times)" in (times.slow(slow, 10) or "")
    assert times.slow(slow, 100) is None
    assert times.slow(usual, 10) is None
    assert times.slow(slow, 20) is not None  # again


def test_one_forward_pass_a_step_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(rank_times.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rank_times, "_places", lambda: [rank_times.Place("a", 0), rank_times.Place("b", 0)])
    times, calls = rank_times.RankTimes(measures=True), []
    step = times.timed(calls.append)
    for _ in range(2):
        times.begin()
        step("first")
        step("second")
    assert len(calls) == 4
    assert len(times._marks) == 2
    assert rank_times.RankTimes(measures=False).timed(step) is step


def test_the_page_has_the_machines(tmp_path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"event": "start", "iteration": 0, "world_size": 3},
        {"event": "ranks", "iteration": 0, "hosts": ["node1", "node1", "node2"], "stages": [0, 0, 0]},
        {"event": "train", "iteration": 1, "losses": [1.0], "forward_ms_of_ranks": [4.0, 5.0, 9.0]},
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert json.loads(Run(metrics, "run").snapshot()[1])["machines"] == [
        {"host": "node1", "ranks": [0, 1], "milliseconds": [4.0, 5.0], "slow": []},
        {"host": "node2", "ranks": [2], "milliseconds": [9.0], "slow": [2]},
    ]
    rows.append({"event": "start", "iteration": 1, "world_size": 1})  # gone on alone
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert json.loads(Run(metrics, "run").snapshot()[1])["machines"] == []
