"""What the main thread is at: the phase that was entered last counts, in that thread alone."""

from __future__ import annotations

import threading

import pytest

from megatron_npu import watchdog
from megatron_npu.watchdog import phases, place


@watchdog.phase("evaluating")
def evaluate() -> str:
    return place.of_main_thread().phase


@watchdog.phase(watchdog.SAVING)
def save_in_vain() -> None:
    assert place.of_main_thread().phase == "saving"
    raise OSError("full")


def test_the_innermost_counts_and_ends_with_its_block() -> None:
    assert place.of_main_thread().phase == "starting"
    with watchdog.phase("training"):
        assert place.of_main_thread().phase == "training"
        assert evaluate() == "evaluating"
        with pytest.raises(OSError, match="full"):
            save_in_vain()
        assert place.of_main_thread().phase == "training"
    assert place.of_main_thread().phase == "starting"


def test_in_waiting_nothing_is_a_hang() -> None:
    with watchdog.phase("training"), watchdog.phase(watchdog.WAITING):
        assert place.of_main_thread().outside
    with watchdog.phase("training"):
        assert not place.of_main_thread().outside


def test_another_thread_says_nothing_of_the_main_one() -> None:
    seen = []

    def work() -> None:
        with watchdog.phase(watchdog.WAITING):
            seen.append(phases.current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


def test_megatrons_own_scripts_are_told_by_their_functions() -> None:
    own = {"__name__": "megatron.training.training", "look": lambda: place.of_main_thread().phase}
    exec("def train():\n  return train_step()\ndef train_step():\n  return look()", own)
    assert own["train"]() == "training"
    with watchdog.phase(watchdog.SAVING):
        assert own["train"]() == "saving"
