"""What counts as training time, and what does not."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_npu.pretrain.checkpoint.checkpoints import Position
from megatron_npu.pretrain.flags.plan_parts import LogFlags
from megatron_npu.pretrain.report import history, log
from megatron_npu.pretrain.run import clock, loop
from megatron_npu.pretrain.run.clock import Clock


@pytest.fixture
def pass_time(monkeypatch):
    """Return a function that lets seconds pass on the clock's own clock."""
    now = [100.0]
    monkeypatch.setattr(clock, "time", Namespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_pauses_do_not_count_and_may_lie_in_each_other(pass_time):
    watch = Clock()
    pass_time(1)  # not started yet
    watch.start()
    pass_time(2)
    with watch.paused():
        pass_time(4)
        with watch.paused():
            pass_time(8)
        pass_time(16)
    pass_time(32)
    assert watch.lap() == 34
    pass_time(64)
    watch.stop()
    pass_time(128)
    assert (watch.lap(), watch.total) == (64, 98)


def test_evaluating_and_drawing_are_no_training(pass_time, monkeypatch):
    """A picture of a long run takes seconds: they are none of the next iteration's."""
    trainer = object.__new__(loop.Trainer)
    due, saves = Namespace(log_interval=9, eval_interval=1), Namespace(save_interval=None)
    trainer.plan, trainer.begin = Namespace(iterations=9, loop=due, saves=saves), 0
    trainer.saving = Namespace(take_finished=lambda: None)
    trainer.position, trainer.clock = Position(iteration=2), Clock()
    trainer.log = Namespace(tick=lambda: None, draw=lambda: pass_time(50))
    monkeypatch.setattr(trainer, "_step", lambda: pass_time(3) or True, raising=False)
    monkeypatch.setattr(trainer, "_evaluate", lambda: pass_time(700), raising=False)
    trainer.clock.start()
    trainer._iterate()
    assert trainer.clock.lap() == 3


def test_each_line_of_the_log_is_read_once_for_all_pictures(tmp_path, monkeypatch):
    places = {"json_log": str(tmp_path / "m.jsonl"), "save": str(tmp_path), "plot": True}
    journal = log.Log(LogFlags(rank=0, train_iters=9, **places), 0)
    read = []
    add = history.History.add
    monkeypatch.setattr(history.History, "add", lambda self, row: (read.append(row), add(self, row)))
    monkeypatch.setattr(history, "draw", lambda past, path: None)
    for iteration in (1, 2):
        journal.write("train", iteration, {"losses": [1.0]})
        journal.draw()
    assert journal.past().losses == {1: 1.0, 2: 1.0}
    assert [row["event"] for row in read] == ["start", "train", "train"]
