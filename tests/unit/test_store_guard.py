"""A rank whose store does not answer ends; one that was stopped itself, or is answered, goes on."""

from __future__ import annotations

import threading

import pytest

from megatron_npu.watchdog import store_guard, verdicts
from megatron_npu.watchdog.board import Process


@pytest.fixture
def guard(monkeypatch):
    """A guard of 0.2 s, which sets an event instead of ending the process."""
    ended = threading.Event()

    def end(code: int) -> None:
        assert code == 1
        ended.set()
        made.stop()

    monkeypatch.setattr(store_guard, "_PERIOD", 0.02)
    monkeypatch.setattr(store_guard.os, "_exit", end)
    monkeypatch.setattr(store_guard.stacks, "print_now", lambda: None)
    made = store_guard.StoreGuard(0.2, lambda seconds: verdicts.of_cut(1, None, "node1:29500", seconds))
    yield made, ended
    made.stop()


def test_a_store_that_does_not_answer_ends_the_rank(guard, capfd) -> None:
    made, ended = guard
    made.start()
    assert ended.wait(30)
    line = "megatron_npu: rank 1 exits: the run's store at node1:29500 has not answered for 0 s: "
    assert capfd.readouterr().err.startswith(line)


def test_one_that_answers_does_not(guard) -> None:
    made, ended = guard
    made.start()
    for _ in range(25):
        made.answered()
        assert not ended.wait(0.02)


def test_a_pause_of_the_process_itself_counts_little(guard, monkeypatch) -> None:
    """As after SIGSTOP, or where a machine has slept."""
    made, ended = guard
    monkeypatch.setattr(store_guard, "_PAUSE", 0.0)
    made.start()
    assert not ended.wait(0.5)


def test_whose_machine_it_is_is_said() -> None:
    told = verdicts.of_cut(3, Process(0, "node1", 7, ""), "node1:29500", 300.4)
    assert "for 300 s: the network to the machine of rank 0 (node1, process 7) is interrupted" in told
