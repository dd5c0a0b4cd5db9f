"""What a run shows while it goes on: losses that are evaluated, each rank's loss, the picture."""

from __future__ import annotations

import errno
import http.client
import importlib.util
import json
import math
import re
import socket

import pytest

from megatron_npu.generation.generate import generate
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.report import history
from megatron_npu.pretrain.run import pretrain
from tests.conftest import LONGEST
from tests.support import tiny

pytest.importorskip("megatron.core")

WATCHED = "--eval-interval 2 --eval-iters 2 --eval-train-loss --log-loss-per-rank".split()


def test_the_curve_is_the_same_to_the_bit_whatever_is_looked_at(train, tmp_path):
    """With dropout, so that one random number drawn on the way would show."""
    drawn = ("--sample-prompt", "1 2 3", "", "--sample-tokens", 5, "--sample-temperature", 1)
    train("--save", tmp_path / "watched", "--plot", "--dashboard", 0, *WATCHED, *drawn)
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
    pretrain.train(arguments.parse([*argv, *map(str, own), *WATCHED]))
    rows = tiny.rows(tmp_path / "m", "validation")
    assert [row["iteration"] for row in rows] == [2, 4, 6]
    assert rows[0]["training_loss"] == rows[0]["loss"]
    assert rows[1]["training_loss"] != rows[1]["loss"]  # validation goes on through its samples
    assert re.search(r"PPL: \S+ \| training samples' lm loss value: \d\.\d{6}E", capsys.readouterr().out)


def test_each_rank_tells_its_own_loss(flags, tmp_path):
    drawn = ("--eval-iters", 0, "--eval-interval", 4, "--sample-prompt", "1 2 3")
    watched = flags("--json-log", tmp_path / "m", "--log-loss-per-rank", *drawn)
    done = tiny.run("pretrain", *watched, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = tiny.rows(tmp_path / "m")
    for row in rows:
        assert set(row["losses_of_ranks"]) == {"0", "1"}
        assert math.fsum(row["losses_of_ranks"].values()) / 2 == pytest.approx(row["loss"], rel=1e-6)
    one, other = rows[-1]["losses_of_ranks"].values()
    assert one != other
    assert [row["iteration"] for row in tiny.rows(tmp_path / "m", "sample")] == [4, 6]  # by all ranks
    assert f" [rank 1] iteration        6/       6 | lm loss: {other:.6E} |" in done.stdout


def test_samples_are_what_the_saved_model_says(train, tmp_path, capsys):
    board = tmp_path / "board"
    asked = ("--sample-prompt", "5 7 9", "", "--sample-tokens", 6)
    train("--save", tmp_path, "--eval-interval", 3, "--tensorboard-dir", board, *asked)
    rows = tiny.rows(tmp_path / "metrics.jsonl", "sample")
    assert [(row["iteration"], row["prompt"]) for row in rows] == [
        (3, "5 7 9"),
        (3, ""),
        (6, "5 7 9"),
        (6, ""),
    ]
    text = generate(str(tmp_path), "5 7 9", num_tokens=6, temperature=0)
    assert "5 7 9" + rows[2]["text"] == text
    assert f" sample at iteration 6 | {text}\n" in capsys.readouterr().out
    assert history.read(tmp_path / "metrics.jsonl").samples[6][0]["text"] == rows[2]["text"]
    if importlib.util.find_spec("tensorboard"):
        from tensorboard.backend.event_processing import event_accumulator

        events = event_accumulator.EventAccumulator(str(board))
        events.Reload()
        assert len(events.Tensors("sample: 5 7 9/text_summary")) == 2


def test_a_model_that_gives_no_numbers_is_trained_on_without_a_sample(train, tmp_path, capsys):
    def spoil(iteration, model):
        for parameter in model[0].parameters():
            parameter.main_grad.fill_(math.nan)

    asked = ("--sample-prompt", "5", "--no-check-for-nan-in-loss-and-grad", "--json-log", tmp_path / "m")
    assert train(*asked, on_gradients=spoil).iterations == 6
    assert " no sample at iteration 6: the model's logits are NaN or infinite" in capsys.readouterr().out
    assert tiny.rows(tmp_path / "m", "sample") == []


def test_prompts_that_cannot_be_are_refused(refused, flags):
    assert (
        "--sample-prompt must have at most 31 tokens, one less than --max-position-embeddings, but has 32"
        in refused("pretrain", *flags("--sample-prompt", "1 " * 32))
    )
    assert "but got 'hello'" in refused("pretrain", *flags("--sample-prompt", "hello"))
    line = refused("pretrain", *flags("--sample-prompt", "1", "--sample-temperature", -1))
    assert "--sample-temperature must be a non-negative number, but got -1" in line


@pytest.fixture
def train_with_a_picture(flags):
    """Return a function: changes to the flags -> summary of a run that draws as ever, with --save."""
    pytest.importorskip("matplotlib")

    def train(*changes):
        return pretrain.train(arguments.parse([word for word in flags(*changes) if word != "--no-plot"]))

    return train


def test_the_picture_is_drawn_at_each_evaluation(train_with_a_picture, tmp_path, monkeypatch):
    drawn, real = [], history.draw

    def draw(past, path):
        drawn.append((max(past.losses), sorted(past.validation)))
        real(past, path)

    monkeypatch.setattr(history, "draw", draw)
    train_with_a_picture("--save", tmp_path, "--eval-interval", 2)
    assert drawn == [(2, [2]), (4, [2, 4]), (6, [2, 4, 6])]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_does_not_end_the_run(
    train_with_a_picture, tmp_path, monkeypatch, capsys
):
    def full(past, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(history, "draw", full)
    summary = train_with_a_picture("--save", tmp_path, "--eval-interval", 2)
    assert (summary.iterations, summary.plot) == (6, None)
    assert capsys.readouterr().out.count("training.png could not be written: No space left") == 3


def shown(capsys):
    """Return where the run says that it is shown."""
    return re.search(r"dashboard of the run: http://(\S+)/", capsys.readouterr().out)[1]


def states(response):
    """Return the states of the run that the page is told until the connection ends."""
    lines = response.read().splitlines()
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]


def test_the_dashboard_follows_a_run_to_its_end_and_goes_with_it(train, tmp_path, capsys):
    pytest.importorskip("uvicorn")
    held = {}

    def look(iteration, model):
        if iteration == 2:
            held["at"] = shown(capsys)
            held["connection"] = http.client.HTTPConnection(held["at"], timeout=LONGEST)
            held["connection"].request("GET", "/events")
            held["events"] = held["connection"].getresponse()

    train("--save", tmp_path, "--dashboard", 0, on_gradients=look)
    last = states(held["events"])[-1]
    assert (last["name"], last["ended_by"], last["iteration"]) == (tmp_path.name, "iterations", 6)
    assert last["curves"]["loss"]["y"] == list(tiny.losses(tmp_path / "metrics.jsonl").values())
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(held["at"]).connect()


def test_the_dashboard_tells_how_a_run_failed(train, tmp_path, capsys):
    pytest.importorskip("uvicorn")
    held = {}

    def fail(iteration, model):
        if iteration == 3:
            connection = http.client.HTTPConnection(shown(capsys), timeout=LONGEST)
            connection.request("GET", "/events")
            held["connection"], held["events"] = connection, connection.getresponse()
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        train("--json-log", tmp_path / "curves.jsonl", "--dashboard", 0, on_gradients=fail)
    last = states(held["events"])[-1]
    assert (last["name"], last["ended_by"], last["iteration"]) == ("curves", "ZeroDivisionError", 2)


def test_a_dashboard_without_numbers_or_port_is_refused(flags, refused, tmp_path):
    assert "--save, --tensorboard-dir or --json-log" in refused("pretrain", *flags("--dashboard", 0))
    line = refused("pretrain", *flags("--dashboard", "localhost", "--save", tmp_path))
    assert "--dashboard must be a port from 0 to 65535, or HOST:PORT, but got localhost" in line
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused("pretrain", *flags("--dashboard", port, "--save", tmp_path))
    assert f"--dashboard 127.0.0.1:{port}: Address already in use" in line
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}
