"""How often the watchdog asks the store: once a second; about a fault as often with 1,024 ranks as with 3."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron_npu.watchdog import rank as of_rank
from megatron_npu.watchdog.board import Beat, Board, Process

QUESTIONS = {"get", "multi_get", "check", "add", "compare_set", "wait"}  # which wait for an answer
BEAT = Beat(7, 3, 0.0, "training", "all_reduce", "training, at x:1 in f", ("x:1 in f",) * 12, "")


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += name in QUESTIONS
        return getattr(self.store, name)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the watchdog of rank 0, all others of which have beaten and entered; and count its questions."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setattr(of_rank, "_PERIOD", 0.01)

    def make(ranks: int) -> tuple[of_rank.Rank, Counted]:
        board = Board(store, str(ranks))
        counted = board._store = Counted(board._store)  # type: ignore[assignment]
        board.open()
        for rank in range(1, ranks):
            board.beat(rank, BEAT)
            board.enter(Process(rank, f"node{rank}", 1, f"space {rank}"))
        watched = of_rank.Rank(board, 0, ranks, 1000.0, lambda: 3)
        watched._look()
        counted.asked = 0
        return watched, counted

    return make


def test_a_rank_asks_once_a_second(watched) -> None:
    rank, counted = watched(8)
    for _ in range(5):
        rank._look()
    assert counted.asked == 5


def _questions(rank: of_rank.Rank, counted: Counted, monkeypatch, living: range) -> tuple[int, float, str]:
    """Let a collective fail while all but ``living`` are silent; return what that costs, and who is named."""
    told: list[str] = []
    monkeypatch.setattr(rank, "_judge", told.append)

    def beat(seconds: float) -> None:
        for each in living:
            rank._board.beat(each, Beat(8, *list(vars(BEAT).values())[1:]))

    monkeypatch.setattr(rank, "_wait_and_beat", beat)
    rank._failing.set()
    counted.asked, began = 0, time.monotonic()
    rank._find_silent()
    return counted.asked, time.monotonic() - began, told[0]


def test_a_fault_costs_as_many_questions_in_any_world(watched, monkeypatch) -> None:
    """It took two for each rank, on each rank: a quarter of a million at 512."""
    few = _questions(*watched(3), monkeypatch, range(1, 2))
    many = _questions(*watched(1024), monkeypatch, range(1, 1023))
    assert few[0] == many[0] <= 5
    assert many[1] < 5.0  # 0.05 s alone; the suite's machines are busy
    assert "rank 2 (node2" in few[2]
    assert "rank 1023 (node1023" in many[2]


def test_a_hang_costs_as_many_questions_in_any_world(watched, monkeypatch) -> None:
    asked = []
    for ranks in (3, 1024):
        rank, counted = watched(ranks)
        told: list[str] = []
        monkeypatch.setattr(rank, "_judge", told.append)
        still = Beat(8, 3, 2000.0, *list(vars(BEAT).values())[3:])
        for each in range(ranks):
            rank._board.beat(each, still)
        rank._stillness.still = 2000.0
        counted.asked = 0
        rank._see_whether_anybody_moves()
        asked.append(counted.asked)
        assert "no rank has made progress" in told[0]
    assert asked[0] == asked[1] <= 3


def test_an_error_on_another_machine_is_named_before_the_limit(watched, monkeypatch) -> None:
    """A rank that waits for the connection of one that has ended waits without an error of its own."""
    rank, counted = watched(3)
    told: list[str] = []
    monkeypatch.setattr(rank, "_judge", told.append)
    monkeypatch.setattr(of_rank, "_QUIET", 0.02)
    rank._board.leave(1, "AssertionError: Mismatch in local rank setting")
    counted.asked = 0
    end = time.monotonic() + 60
    while not told and time.monotonic() < end:
        rank._look()
    assert "rank 1 (node1, process 1) exited with AssertionError: Mismatch in local rank setting" in told[0]
