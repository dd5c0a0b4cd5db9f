"""Flags around the training step of the stock pretrain_gpt.py, many of them in each run."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import checkout, on_a_leash
from tests.support import tiny, warm
from tests.support.simulated import unavailable
from tests.support.stock_core import FLAGS, Run, losses, pretrain

# constant: the losses do not depend on --train-iters
COMMON = "--attention-dropout 0.1 --hidden-dropout 0.1 --lr-decay-style constant".split()
LOGGING = """
    --log-memory-to-tensorboard --log-timers-to-tensorboard --timing-log-level 2 --log-throughput
    --log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard --log-progress
    --log-world-size-to-tensorboard --log-device-memory-used --log-memory-interval 2
    --log-straggler --straggler-ctrlr-port 0 --rerun-mode report_stats
    --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3
    --manual-gc --manual-gc-interval 2 --empty-unused-memory-level 2 --exit-signal-handler
    --check-for-large-grads --check-for-spiky-loss
""".split()
LOSS, NORM = r"iteration .* lm loss: (\S+)", r"grad norm: (\S+)"


@pytest.fixture(scope="module")
def tree() -> Path:
    pytest.importorskip("megatron.core")
    return checkout("megatron_core", "0.16.1")


@pytest.fixture(scope="module", params=["cpu", "npu"])
def logged(request, tree: Path, tmp_path_factory) -> tuple[Run, Path, str]:
    """One run with every flag that logs something, its folder, and the device."""
    if request.param == "npu" and unavailable():
        pytest.skip(unavailable())
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp(request.param)
    options = ["--tensorboard-dir", str(folder), "--save", str(folder), "--save-interval", "100"]
    if request.param == "npu":
        options += ["--record-memory-history", "--memory-snapshot-path", str(folder / "snapshot.pickle")]
    done = pretrain(tree, folder, *LOGGING, *COMMON, *options, "--train-iters", "4", device=request.param)
    return done, folder, request.param


def test_it_trains_with_all_of_them(logged) -> None:
    done, _, _ = logged
    assert len(losses(done)) == 4


def test_memory_is_measured(logged) -> None:
    done, folder, device = logged
    reports = re.findall(
        r"memory \(MB\) \| allocated: (\S+) \| max allocated: (\S+) .* total device memory used: (\S+)",
        done.stdout,
    )
    assert reports
    for allocated, peak, used in (map(float, report) for report in reports):
        assert 0 < allocated <= peak
        assert used > 0
        if device == "cpu":  # torch and Megatron alone take more
            assert allocated > 100
    assert _scalars(folder)["mem-allocated-bytes"][-1] > 0


def test_timers_and_norms_reach_tensorboard(logged) -> None:
    scalars = _scalars(logged[1])
    for name in ("forward-backward-time", "optimizer-time", "params-norm", "grad-norm", "throughput"):
        assert scalars[name][-1] > 0, name
    assert "num-zeros" in scalars
    assert scalars["lm loss validation ppl"][-1] == pytest.approx(math.exp(scalars["lm loss validation"][-1]))


def test_a_log_of_simulated_npus_cannot_be_taken_for_one_of_hardware(logged) -> None:
    done, folder, device = logged
    iterations = [line for line in done.stdout.splitlines() if "elapsed time per iteration" in line]
    assert len(iterations) == 4
    assert all(line.endswith("| simulated npu |") == (device == "npu") for line in iterations)
    assert (folder / "simulated-npu").is_dir() == (device == "npu")
    assert any(folder.glob("events.out.*")) == (device == "cpu")


def _scalars(folder: Path) -> dict[str, list[float]]:
    """Return the curves of the one run in ``folder``; one of a simulated device has a folder in it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.*")
    events = EventAccumulator(str(file.parent)).Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def _log(done: Run) -> str:
    """Return what was logged: on stdout by Megatron's handler, on stderr where another came first."""
    return done.stdout if done.stderr is done.stdout else done.stdout + done.stderr


def test_the_straggler_detector_reports(logged) -> None:
    times = re.findall(r"MnRtt/Rnk: (\S+)ms/0", _log(logged[0]))
    assert len(times) == 4
    assert all(float(milliseconds) > 0 for milliseconds in times)


def test_reruns_are_identical(logged) -> None:
    """Dropout included: the generators of host and device are put back for the second time."""
    output = _log(logged[0])
    assert "all identical" in output
    assert "non-identical" not in output


def test_the_profiler_writes_a_trace(logged) -> None:
    (trace,) = logged[1].glob("*.pt.trace.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    # the last where oneDNN is the faster library (ops/linear.py)
    assert names & {"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"}


def test_the_history_of_memory_is_dumped(logged) -> None:
    _, folder, device = logged
    if device == "cpu":
        pytest.skip("the case: refused on a cpu: test_arguments.py")
    assert (folder / "snapshot.pickle").stat().st_size > 10_000


def test_a_signal_saves_and_ends_a_run_that_recomputes(tree: Path, tmp_path: Path, logged) -> None:
    """SIGTERM after the third iteration of a run that would take hours.

    It recomputes what it can, whole MLPs among it, whose bias stock turns into a loop without end: the losses
    are those of the run that keeps everything, dropout being drawn again as it was.
    """
    if logged[2] != "cpu":
        pytest.skip("the case: a run of the simulator takes twice as long")
    script = [str(tree / "pretrain_gpt.py"), "--mock-data", *FLAGS, *COMMON, "--train-iters", "100000"]
    modules = "--recompute-granularity selective --recompute-modules core_attn layernorm mlp".split()
    save = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "100000", "--exit-signal-handler"]
    output = _until_terminated(r"iteration +3/", [*script, *modules, *save], tmp_path, tree)
    assert "exiting program after receiving SIGTERM" in output
    saved = int((tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < 100000
    for pattern in (LOSS, NORM):
        assert re.findall(pattern, output)[:3] == re.findall(pattern, logged[0].stdout)[:3]


def _until_terminated(line: str, command: list[str], folder: Path, tree: Path) -> str:
    """Run the script, send SIGTERM at the line; return its output when it has ended well."""
    command, env = warm.ready(
        [sys.executable, "-u", "-m", "megatron_npu", "run", *command],
        tiny.environment() | {"MEGATRON_LM_PATH": str(tree)},
        warm.STOCK,
        tree,
    )
    process = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with on_a_leash(process):
        lines = []
        for printed in process.stdout:
            lines.append(printed)
            if re.search(line, printed):
                process.send_signal(signal.SIGTERM)
    output = "".join(lines)
    assert process.returncode == 0, output[-4000:]
    return output
