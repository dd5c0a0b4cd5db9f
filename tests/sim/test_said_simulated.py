"""Whatever a run on simulated NPUs tells of itself says so: a log is pasted without its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import tiny, warm

# one process tells everything: the driver's run, then the ledger in both forms
PROGRAM = """
import sys
from megatron_npu.commands import cli; from megatron_npu import ledger
code = cli.main(sys.argv[1:])
print("LEDGER", ledger().json().replace("\\n", " "))
print(ledger().text())
sys.exit(code)
"""


@pytest.fixture(scope="module")
def run(simulated, tmp_path_factory) -> tuple[list[str], Path]:
    """Train two iterations with the driver; return the lines that it printed, and its folder."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("run")
    flags = [*tiny.flags_for(folder / "none")[:-2], "--mock-data"]
    places = ["--save", str(folder / "save"), "--tensorboard-dir", str(folder / "board")]
    line = ["pretrain", *flags, *places, "--train-iters", "2", "--no-plot"]
    done = simulated("python", "-c", PROGRAM, *line, modules=warm.DRIVER)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.splitlines(), folder


def test_the_banner(run) -> None:
    assert any("· simulated npu/hccl ·" in line for line in run[0])


def test_why_its_losses_differ_from_a_cpu_s(run) -> None:
    (line,) = (line for line in run[0] if "random generator" in line)
    assert line == (
        " initial weights and dropout are drawn by the npu's random generator, so losses differ from those "
        "of a CPU run with the same --seed; --use-cpu-initialization draws the weights on the CPU"
    )


def test_indices_of_mock_data_are_not_spoken_of(run) -> None:
    """Upstream warns that it cannot save them, which nobody wants."""
    assert not [line for line in run[0] if "Unable to save" in line]


def test_every_line_of_an_iteration(run) -> None:
    iterations = [line for line in run[0] if "throughput per device (TFLOP/s): " in line]
    assert len(iterations) == 2
    assert all(line.endswith("| simulated npu |") for line in iterations)


def test_the_ledger(run) -> None:
    (line,) = (line for line in run[0] if line.startswith("LEDGER "))
    told = json.loads(line.removeprefix("LEDGER "))
    assert (told["device"], told["backend"], told["simulated"]) == ("simulated npu", "hccl", True)
    assert any(line.endswith("· device simulated npu · backend hccl") for line in run[0])


def test_metrics_and_summary(run) -> None:
    save = run[1] / "save"
    assert tiny.rows(save / "metrics.jsonl", "start")[0]["device"] == "simulated npu"
    assert json.loads((save / "summary.json").read_text())["simulated"] is True


def test_the_name_of_the_run_in_tensorboard(run) -> None:
    """TensorBoard names a run by its folder below --logdir."""
    assert [path.name for path in (run[1] / "board").iterdir()] == ["simulated-npu"]
