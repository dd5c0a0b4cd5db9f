"""A GPT trained on simulated NPUs, alone and in parallel over HCCL, has the loss curve of one CPU process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end import tiny
from tests.end_to_end.conftest import dataset

__all__ = ["dataset"]

WORKER = Path(__file__).resolve().parents[1] / "distributed" / "worker.py"
STEPS = 10
MODEL = (
    "--num-layers 4 --hidden-size 64 --attention-dropout 0 --hidden-dropout 0 "
    f"--train-iters {STEPS} --eval-iters 0 --lr 1e-3 --no-plot"
).split()
LIMIT = 1e-4  # relative, fp32

# layout: number of NPUs, flags, and what must have gone over HCCL
LAYOUTS = {
    "one": (1, "", ()),
    "tp2-sp": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel",
        ("AllReduce", "AllGather", "ReduceScatter"),
    ),
    "pp2": (2, "--pipeline-model-parallel-size 2", ("BatchSendRecv",)),
}


@pytest.fixture(scope="module")
def on_cpu(dataset, tmp_path_factory) -> tuple[list[str], list[float]]:
    """Return the flags, with a common start, and the losses of one CPU process."""
    folder = tmp_path_factory.mktemp("cpu")
    flags = [*tiny.flags_for(dataset), *MODEL]
    saved = tiny.run("pretrain", *flags, "--train-iters", "0", "--save", str(folder / "start"))
    assert saved.returncode == 0, saved.stderr
    flags += ["--load", str(folder / "start"), "--finetune"]
    done = tiny.run_python(
        [sys.executable, str(WORKER), str(folder / "norms"), *flags, "--json-log", str(folder / "log")]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return flags, [row["loss"] for row in tiny.rows(folder / "log")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_curve_equals_the_cpu(simulated, on_cpu, tmp_path, layout):
    npus, extra, collectives = LAYOUTS[layout]
    flags, expected = on_cpu
    launcher = tiny.torchrun(npus)
    worker = [
        str(WORKER),
        str(tmp_path / "norms"),
        *flags,
        *extra.split(),
        "--json-log",
        str(tmp_path / "log"),
    ]
    report = {
        "MEGATRON_NPU_SIM_REPORT": str(tmp_path / "report.json"),
        "MEGATRON_NPU_SIM_HCCL_TIMEOUT": "120",
    }
    done = simulated("python", *launcher, *worker, **report)
    assert done.returncode == 0, done.stdout[-6000:]
    losses = [row["loss"] for row in tiny.rows(tmp_path / "log")]
    assert len(losses) == len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.05, "the run must learn, or curves say nothing"
    deviation = max(
        abs(loss - reference) / reference for loss, reference in zip(losses, expected, strict=True)
    )
    print(layout, "deviates by", deviation)
    assert deviation < LIMIT
    for rank in range(npus):
        counts = json.loads((tmp_path / f"report.rank{rank}.json").read_text())
        assert "npu::npu_fusion_attention" in counts["launches"]
        for name in collectives:
            assert counts["communication"][name]["calls"] >= STEPS, (name, counts["communication"])
