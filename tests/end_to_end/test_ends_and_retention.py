"""When a run ends before its time, and which of its checkpoints stay."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import removal
from megatron_npu.pretrain.flags.checks import logs_and_checkpoints
from megatron_npu.pretrain.flags.plan_parts import SaveFlags
from megatron_npu.pretrain.run import evaluating, termination
from tests.support import tiny

pytest.importorskip("megatron.core")
QUICK = ("--eval-iters", 0, "--no-plot")


@pytest.fixture
def leap(monkeypatch):
    """Return a function that makes an hour pass on the clock of a run's deadline."""
    ahead = [0.0]
    monkeypatch.setattr(termination, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    return lambda: ahead.__setitem__(0, 3600.0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "iter_" in path.name)


def test_a_run_saves_and_ends_when_its_time_is_over(train, tmp_path, leap, capsys):
    def look(iteration, model):
        return leap() if iteration == 3 else None

    summary = train("--save", tmp_path, "--exit-duration-in-mins", 59, *QUICK, on_gradients=look)
    assert (summary.ended_by, summary.iterations) == ("exit-duration", 3)
    assert names(tmp_path) == ["iter_0000003"]
    assert " stopping at iteration 3: exit-duration" in capsys.readouterr().out
    again = train("--save", tmp_path, "--load", tmp_path, "--exit-duration-in-mins", 600, *QUICK)
    assert (again.ended_by, again.iterations) == ("iterations", 6)


def test_the_command_counts_from_its_beginning(train, monkeypatch):
    """What is set up before the first step takes of the time, too."""
    monkeypatch.setattr(termination, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600))
    assert train("--exit-duration-in-mins", 59, *QUICK).iterations == 1
    assert train("--exit-duration-in-mins", 61, *QUICK).iterations == 6


def test_a_validation_is_given_up_when_the_time_is_over(train, tmp_path, leap, monkeypatch, capsys):
    real, looks = evaluating.Evaluation._mean_loss, []

    def measure(self, *given):
        looks.append(given)
        leap()
        return real(self, *given)

    monkeypatch.setattr(evaluating.Evaluation, "_mean_loss", measure)
    words = ("--save", tmp_path, "--exit-duration-in-mins", 59, "--eval-interval", 2, "--eval-iters", 3)
    summary = train(*words)
    assert len(looks) == 1
    assert (summary.ended_by, summary.iterations, summary.validation_loss) == ("exit-duration", 2, None)
    assert (
        "no validation at iteration 2: the time limit --exit-duration-in-mins has passed"
        in capsys.readouterr().out
    )
    assert names(tmp_path) == ["iter_0000002"]
    (description,) = tmp_path.glob("iter_*/arguments.json")
    assert json.loads(description.read_text())["consumed_valid_samples"] == 0


def test_all_ranks_end_when_the_time_is_over_on_one(dataset, tmp_path):
    worker = Path(__file__).resolve().parents[1] / "distributed" / "ending_worker.py"
    flags = [*tiny.flags_for(dataset), "--exit-duration-in-mins", "59", "--save", str(tmp_path / "run")]
    done = tiny.run_python([sys.executable, *tiny.torchrun(2), str(worker), *flags])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (found["ended_by"], found["iterations"]) == ("exit-duration", 2)
    assert names(tmp_path / "run") == ["iter_0000002"]


def test_another_signal_is_listened_for(train):
    def send(iteration, model):
        if iteration == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    before, own = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    heard = []

    def look(iteration, model):
        heard.append(signal.getsignal(signal.SIGTERM) is before)
        send(iteration, model)

    summary = train("--exit-signal-handler", "--exit-signal", "SIGUSR1", *QUICK, on_gradients=look)
    assert (summary.ended_by, summary.iterations) == ("signal", 2)
    assert all(heard), "as upstream, the signal that is named is the one"
    assert signal.getsignal(signal.SIGUSR1) == own


def test_ctrl_c_named_twice_does_what_it_did_before():
    before = signal.getsignal(signal.SIGINT)
    with termination.Termination(True, (signal.SIGINT, signal.SIGINT)):
        assert signal.getsignal(signal.SIGINT) != before
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == before, "a second one ends the process"
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_that_nobody_listens_for_is_refused(refused, flags):
    assert "--exit-signal SIGUSR1 requires --exit-signal-handler" in refused(
        "pretrain", *flags("--exit-signal", "SIGUSR1")
    )
    assert "--exit-signal" in refused("pretrain", *flags("--exit-signal", "SIGKILL"))


KEPT = [
    ("--save-keep-last 2", [5, 6]),
    ("--save-keep-last 1", [6]),
    ("--save-retain-interval 3", [3, 6]),
    ("--save-keep-last 2 --save-retain-interval 2", [2, 4, 5, 6]),
    ("--save-keep-last 2 --async-save", [5, 6]),
    ("--save-keep-last 9", [1, 2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize(("words", "kept"), KEPT, ids=[words for words, _ in KEPT])
def test_what_is_not_to_be_kept_is_removed(train, tmp_path, words, kept):
    """Each time there are no more than are asked for, beside the one that has just been saved."""
    counts = []
    summary = train(
        *("--save", tmp_path, "--save-interval", 1, *words.split(), *QUICK),
        on_gradients=lambda iteration, model: counts.append(len(names(tmp_path))),
    )
    assert names(tmp_path) == [f"iter_{number:07d}" for number in kept]
    assert summary.checkpoint == str(tmp_path / "iter_0000006")
    assert max(counts) <= len(kept) + 1
    again = train("--save", tmp_path, "--load", tmp_path, "--train-iters", 6, *QUICK)
    assert again.iterations == 6


def saved(folder: Path, iterations: range, damaged: tuple[int, ...] = ()) -> None:
    """Write what looks like checkpoints, some of them without their files."""
    for number in iterations:
        place = folder / f"iter_{number:07d}"
        place.mkdir()
        for name in () if number in damaged else ("common.pt", "metadata.json", ".metadata"):
            (place / name).write_text("")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iterations[-1]))


def retention(folder: Path, keep: int | None, every: int | None):
    from megatron_npu.pretrain.run.retention import Retention

    said: list[str] = []
    flags = SaveFlags(str(folder), None, False, keep, every)
    return Retention(flags, said.append), said


def test_what_is_damaged_does_not_count_and_later_ones_stay(tmp_path):
    saved(tmp_path, range(1, 9), damaged=(5, 6))
    judge, said = retention(tmp_path, 2, None)
    judge.after(tmp_path / "iter_0000007", 7)  # a run that has gone back behind 8
    assert names(tmp_path) == [f"iter_{number:07d}" for number in (4, 5, 6, 7, 8)]
    assert len(said) == 3


def test_upstreams_flag_removes_the_one_before_alone_and_no_link(tmp_path):
    saved(tmp_path, range(1, 4))
    judge, _ = retention(tmp_path, None, 10)
    saved(tmp_path, range(4, 5))
    judge.after(tmp_path / "iter_0000004", 4)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000004"]
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "iter_0000004").rename(elsewhere)
    (tmp_path / "iter_0000004").symlink_to(elsewhere)
    saved(tmp_path, range(5, 6))
    judge.after(tmp_path / "iter_0000005", 5)
    assert "iter_0000004" in names(tmp_path)


def test_one_that_cannot_be_removed_does_not_end_the_run(train, tmp_path, monkeypatch, capsys):
    def refuse(path):
        raise UsageError(f"{path} cannot be removed (Read-only file system)", "a folder", "Change it.")

    monkeypatch.setattr(removal, "remove", refuse)
    summary = train("--save", tmp_path, "--save-interval", 2, "--save-keep-last", 1, *QUICK)
    assert summary.iterations == 6
    assert "iter_0000002 cannot be removed (Read-only file system)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            {"save_keep_last": 2},
            "--save-keep-last 2 requires --save and --save-interval. Add --save DIR --save-interval N",
        ),
        ({"save_retain_interval": 5, "save_interval": 2}, "a multiple of --save-interval 2"),
    ],
)
def test_flags_that_would_keep_nothing_are_refused(words, named):
    values = dict.fromkeys(("save_interval", "save_keep_last", "save_retain_interval", "save_per_machine"))
    values["save"] = "here"
    with pytest.raises(UsageError, match=named):
        logs_and_checkpoints.checkpoints(Namespace(**(values | words)))
