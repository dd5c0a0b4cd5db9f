"""``megatron-npu bench``: one table in one start, rows that run out of memory, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron_npu.measuring import command, ranks
from megatron_npu.measuring.job import Job
from megatron_npu.measuring.schemes import SUITES
from megatron_npu.measuring.sizes import BERT, GPT, parameters
from megatron_npu.pretrain.run import host_memory
from megatron_npu.process import interruption
from tests.support import tiny, warm
from tests.support.payload import Runs

SIZE = "--model 2x32x4 --seq-length 16 --vocab-size 256".split()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    _, env = warm.ready([sys.executable], tiny.environment(), warm.DRIVER)
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def job(vocabulary: int = 256, **values) -> Job:
    size = GPT.size("2x32x4", seq_length=16, vocabulary=vocabulary)
    suite = SUITES["3d"]
    alone = {"ranks": 1, "micro_batch_size": 1, "global_batch_size": 1, "steps": 1, "repeat": 2}
    return Job(workload=suite.workload, scheme=suite.schemes[0], size=size, **(alone | values))


def rows_alone(monkeypatch, suite: str, rows: slice) -> None:
    """Let a table have these rows alone."""
    monkeypatch.setitem(SUITES, suite, replace(SUITES[suite], schemes=SUITES[suite].schemes[rows]))


def test_a_table(tmp_path, monkeypatch, capsys):
    """A row of two ranks, and one that says why not."""
    rows_alone(monkeypatch, "3d", slice(1, 3))
    result, page, picture = (tmp_path / f"table.{kind}" for kind in ("json", "md", "png"))
    line = f"--suite 3d --devices 2 --steps 2 --repeat 3 --json {result} --markdown {page} --plot {picture}"
    assert command.main([*line.split(), *SIZE]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(page.read_text())
    found = json.loads(result.read_text())
    measured, absent = found["rows"]
    assert (measured["outcome"], absent["outcome"]) == ("measured", "NA")
    assert len(measured["samples_per_second_of_repeats"]) == 3
    assert len(measured["peak_bytes_of_ranks"]) == 2
    assert measured["samples_per_second"] > 0
    # 256 rows of the embedding and 16 positions of 32, two layers, the last norm
    assert found["parameters"] == (256 + 16) * 32 + 2 * (12 * 32**2 + 13 * 32) + 64
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_table_of_transformers(devices, tmp_path, monkeypatch):
    """BERT with both heads in mixed precision, its parameters counted by hand, also on ranks that meet."""
    rows_alone(monkeypatch, "mixed-precision", slice(1, 2))
    result = tmp_path / "table.json"
    line = f"--suite mixed-precision --devices {devices} --steps 1 --repeat 2 --json {result}"
    assert command.main([*line.split(), *SIZE]) == 0
    found = json.loads(result.read_text())
    assert [row["outcome"] for row in found["rows"]] == ["measured"]
    size = BERT.size("2x32x4", seq_length=16, vocabulary=256)
    assert found["parameters"] == parameters(BERT, size)


def test_a_folder_is_no_size_and_nothing_in_it_is_read(tmp_path, refused):
    """Models of the tables are made of sizes: ``bench`` has no reader of anybody's files."""
    torch.save({"weight": Runs(tmp_path / "mark")}, tmp_path / "pytorch_model.bin")
    line = "bench --suite mixed-precision --devices 1 --model".split()
    assert "LAYERSxHIDDEN" in refused(*line, tmp_path)
    assert not (tmp_path / "mark").exists()


def test_a_rank_beyond_its_limit_is_a_row():
    outcome = ranks.run(
        job(vocabulary=1 << 20, memory_limit=100 << 20), lambda steps: None
    )  # weights: 128 MB
    assert outcome.kind == ranks.OOM, outcome
    assert "memory" in outcome.reason


def test_a_machine_that_runs_out_of_memory_ends_the_row(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 0)
    outcome = ranks.run(job(), lambda steps: None)
    assert outcome.kind == ranks.OOM
    assert "reserved for other programs" in outcome.reason


def test_a_killed_rank_is_out_of_memory_and_none_is_left(monkeypatch):
    started: list[subprocess.Popen] = []
    start = ranks._start

    def killed(*arguments):
        process = start(*arguments)
        started.append(process)
        os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(ranks, "_start", killed)
    outcome = ranks.run(job(), lambda steps: None)
    assert outcome.kind == ranks.OOM
    assert "SIGKILL" in outcome.reason
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_row_that_fails_otherwise_says_what_failed(monkeypatch, capsys):
    outcome = ranks.run(replace(job(), workload="megatron:nothing"), lambda steps: None)
    assert outcome.kind == ranks.FAILED
    assert "AttributeError" in outcome.reason
    assert "Traceback" in outcome.log
    monkeypatch.setattr(command.ranks, "run", lambda job, follow: outcome)
    assert command.main(["--suite", "3d", "--devices", "1", *SIZE]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [KeyboardInterrupt, interruption.HungUpError])
def test_an_interrupt_leaves_what_is_measured(tmp_path, monkeypatch, capsys, kind):
    outcomes = iter([ranks.Outcome(ranks.MEASURED, "", [1.0, 2.0], [1 << 20], 1000, "a processor")])

    def run(job, follow):
        for outcome in outcomes:
            return outcome
        raise kind

    monkeypatch.setattr(command.ranks, "run", run)
    path = tmp_path / "table.json"
    with pytest.raises(kind, match="; 1 of 7 rows were measured"):
        command.main(["--suite", "3d", "--devices", "2", "--json", str(path), *SIZE])
    assert "not measured" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["outcome"] for row in rows[:2]] == ["measured", "not measured"]
