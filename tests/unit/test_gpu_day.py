"""``make gpu`` without a GPU: refused in a line, its commands, its programs with small sizes, its page."""

from __future__ import annotations

import json
import sys

import psutil
import pytest

from megatron_npu.commands import cli
from tests.conftest import ROOT, wait_until
from tests.support import processes, tiny


@pytest.fixture
def day(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_day

    return gpu_day


@pytest.fixture
def page(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_page

    monkeypatch.setattr(gpu_page, "RESULTS", tmp_path)
    return gpu_page


def test_without_a_gpu_it_is_refused_in_a_line(day, monkeypatch, capsys) -> None:
    monkeypatch.setattr(day, "why_no_gpu", lambda: "torch sees no GPU")
    monkeypatch.setattr(day, "run_all", lambda *_: pytest.fail("it runs"))
    assert day.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu: torch sees no GPU; this script requires a CUDA GPU")


def test_a_piece_that_is_not_there_is_named(day, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        day.main(["benchmark"])
    assert "benchmark is not a piece; the pieces are tests, verify, losses" in capsys.readouterr().err


@pytest.mark.parametrize("rehearsal", [[], ["--rehearse"]])
def test_a_dry_run_shows_what_each_piece_would_run(day, capsys, rehearsal) -> None:
    assert day.main(["--dry-run", *rehearsal]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown if line.startswith("# ")] == [
        f"# {name}" for name in day.PIECES
    ]
    commands = [line.split() for line in shown if line.startswith(sys.executable)]
    for command in commands:
        if command[1:3] == ["-m", "megatron_npu"]:
            assert command[3] in cli.COMMANDS
        elif command[1] not in ("-m", "-c"):
            assert (ROOT / command[1]).is_file(), command


def test_a_command_that_fails_or_takes_too_long_ends_neither_its_piece_nor_the_others(
    day, monkeypatch, tmp_path, capsys
) -> None:
    python = [sys.executable, "-S", "-c"]
    bad = [[*python, "print('why'); raise SystemExit(3)"], [*python, "print('still')"]]
    pieces = {"bad": lambda day: bad, "good": lambda day: [[*python, "pass"]]}
    monkeypatch.setattr(day, "PIECES", pieces)
    assert day.run_all(["bad", "good"], day.Day(True, tmp_path)) == 1
    found = json.loads((tmp_path / "bad.piece.json").read_text())
    assert [(row["exit_code"], row["end"]) for row in found["commands"]] == [(3, "why"), (0, "still")]
    told = capsys.readouterr().out
    assert "exit code 3: " in told
    assert "good: " in told
    wrong = [[*python, "print('verify: norm: largest error 1; 30 comparisons, 20 above the limit')"]]
    monkeypatch.setattr(day, "PIECES", {"verify": lambda day: wrong})
    assert day.run_all(["verify"], day.Day(True, tmp_path)) == 1
    assert "operations beyond their limits" in capsys.readouterr().out
    monkeypatch.setattr(day, "PIECES", {"slow": lambda day: [[*python, "import time; time.sleep(600)"]]})
    assert day.run_all(["slow"], day.Day(True, tmp_path, limit=0.0)) == 1
    assert "no end in time" in capsys.readouterr().out


def test_what_a_command_has_started_ends_with_it(day, monkeypatch, tmp_path) -> None:
    """Ranks of a benchmark that is ended, for instance."""
    start = f"""
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "rank")!r}, "w").write(str(rank.pid))
"""
    monkeypatch.setattr(day, "PIECES", {"leaves": lambda day: [[sys.executable, "-S", "-c", start]]})
    assert day.run_all(["leaves"], day.Day(True, tmp_path)) == 0
    rank = int((tmp_path / "rank").read_text())
    wait_until(lambda: not is_running(rank))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_operations_are_measured_beside_what_is_there(tmp_path) -> None:
    """On the CPU with small sizes: a variant that is absent or refuses is a row with the reason."""
    output = tmp_path / "gpu" / "operations.json"
    words = ["--tiny", "--repeat", "1", "--only", "attention 32", "--output", str(output)]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_ops.py"), *words]
    env = {**tiny.environment(), "TORCHDYNAMO_DISABLE": "1"}  # flex then runs as it is written
    done = processes.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    ours = [row for row in rows if row["variant"] == "project"]
    assert [row["operation"] for row in ours] == ["attention 32", "attention 32 window 8"]
    assert all(row["difference"] < 1e-2 and row["milliseconds"] > 0 for row in ours)
    cudnn = next(row for row in rows if row["variant"] == "torch cuDNN")
    assert cudnn["refused"].startswith("RuntimeError")


def test_the_page_has_every_result(page, tmp_path) -> None:
    assert page.NEVER in page.page()
    machine = {"device": "NVIDIA X", "versions": {"torch": "2.13"}}
    command = {"command": "run it", "exit_code": 1, "end": ""}
    row = {
        "operation": "norm",
        "variant": "project",
        "milliseconds": 1.5,
        "peak_bytes": 2**20,
        "difference": 1e-3,
    }
    results = {
        "verify.piece": {"piece": "verify", "seconds": 61.2, "commands": [command]},
        "operations": {
            **machine,
            "rows": [row, {"operation": "norm", "variant": "Liger", "refused": "not here"}],
        },
        "train-gpt-345m": {
            **machine,
            "model": {"name": "gpt-345m", "batch": 16, "seq": 1024},
            "dtype": "bf16",
            "tokens_per_second": {"project": [90_000.0]},
            "peak_bytes": {"project": [3 << 30]},
            "start_seconds": {"project": [9.5]},
            "mfu": {"project": 0.412},
        },
        "bench-3d": {
            "rows": [{"scheme": "1 x 1", "outcome": "measured", "samples_per_second": 7.1, "peak_mb": 280}]
        },
    }
    for name, found in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    text = page.page()
    for line in (
        "| verify | 61 | 1 | `run it` |",
        "| norm | project | 1.500 | 1 | 1.0e-03 |",
        "| norm | Liger | not here | | |",
        "| project | 90,000 | 41.2% | 3.0 | 9.5 |",
        "| 1 x 1 | measured | 7.1 | 280 |",
    ):
        assert line in text
    assert page.NEVER not in text


def test_the_share_of_the_peak_is_counted_as_palm_does(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import train

    model = train.MODELS["gpt-345m"]
    assert train.operations_of(model) == pytest.approx(6 * 353.8e6 + 12 * 24 * 1024 * 1024, rel=0.01)
    monkeypatch.setattr(train, "device_name", lambda: "NVIDIA H200")
    assert train.shares_of_peak({"project": 989e12 / train.operations_of(model)}, model) == {"project": 1.0}
    monkeypatch.setattr(train, "device_name", lambda: "another")
    assert train.shares_of_peak({"project": 1.0}, model) == {}
