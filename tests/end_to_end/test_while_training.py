"""What a run shows while it goes on: losses that are evaluated, each rank's loss, the picture."""

from __future__ import annotations

import errno
import math
import re

import pytest

from megatron_npu.training import arguments, history, pretrain
from tests.end_to_end import tiny

pytest.importorskip("megatron.core")

WATCHED = ("--eval-interval", 2, "--eval-iters", 2, "--eval-train-loss", "--log-loss-per-rank")


def test_the_curve_is_the_same_to_the_bit_whatever_is_looked_at(train, tmp_path):
    """With dropout, so that one random number drawn on the way would show."""
    train("--save", tmp_path / "watched", "--plot", *WATCHED)
    train("--save", tmp_path / "alone", "--eval-iters", 0)
    watched, alone = tmp_path / "watched", tmp_path / "alone"
    assert tiny.losses(watched / "metrics.jsonl") == tiny.losses(alone / "metrics.jsonl")
    assert tiny.differences(watched / "iter_0000006", alone / "iter_0000006") == []


def test_training_samples_are_evaluated_without_dropout_and_always_the_same(tmp_path, dataset, capsys):
    """Validation on the data of training, in the same order, is what it must be: to the last digit."""
    argv = tiny.flags_for(dataset)
    for flag in ("--data-path", "--split"):
        at = argv.index(flag)
        del argv[at : at + 2]
    own = ("--train-data-path", dataset, "--valid-data-path", dataset, "--json-log", tmp_path / "m")
    pretrain.train(arguments.parse([*argv, *map(str, own), *map(str, WATCHED)]))
    rows = tiny.rows(tmp_path / "m", "validation")
    assert [row["iteration"] for row in rows] == [2, 4, 6]
    assert rows[0]["training_loss"] == rows[0]["loss"]
    assert rows[1]["training_loss"] != rows[1]["loss"]  # validation goes on through its samples
    assert re.search(r"PPL: \S+ \| training samples' lm loss value: \d\.\d{6}E", capsys.readouterr().out)


def test_each_rank_tells_its_own_loss(flags, tmp_path):
    watched = flags("--json-log", tmp_path / "m", "--eval-iters", 0, "--log-loss-per-rank")
    done = tiny.run("pretrain", *watched, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = tiny.rows(tmp_path / "m")
    for row in rows:
        assert set(row["losses_of_ranks"]) == {"0", "1"}
        assert math.fsum(row["losses_of_ranks"].values()) / 2 == pytest.approx(row["loss"], rel=1e-6)
    one, other = rows[-1]["losses_of_ranks"].values()
    assert one != other
    assert f" [rank 1] iteration        6/       6 | lm loss: {other:.6E} |" in done.stdout


def test_the_picture_is_drawn_at_each_evaluation(train, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, real = [], history.draw

    def draw(past, path):
        drawn.append((max(past.losses), sorted(past.validation)))
        real(past, path)

    monkeypatch.setattr(history, "draw", draw)
    train("--save", tmp_path, "--eval-interval", 2)
    assert drawn == [(2, [2]), (4, [2, 4]), (6, [2, 4, 6])]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_does_not_end_the_run(train, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def full(past, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(history, "draw", full)
    summary = train("--save", tmp_path, "--eval-interval", 2)
    assert (summary.iterations, summary.plot) == (6, None)
    assert capsys.readouterr().out.count("training.png could not be written: No space left") == 3
