"""Every layout trains like one process: the same losses, gradient norms and first-layer gradients."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end import tiny

WORKER = Path(__file__).parent / "worker.py"
STEPS = 20
MODEL = (
    "--num-layers 4 --hidden-size 64 --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 "
    f"--train-iters {STEPS} --eval-iters 0 --lr 1e-3 --no-plot"
)
TWO = {
    "tp2": "--tensor-model-parallel-size 2",
    "tp2-sp-linear-loss": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
    "pp2": "--pipeline-model-parallel-size 2",
    "pp2-interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "dp2": "",
    "dp2-distributed-optimizer": "--use-distributed-optimizer",
    "cp2": "--context-parallel-size 2",
    "cp2-a2a": "--context-parallel-size 2 --cp-comm-type a2a",
}
FOUR = {
    "tp2-pp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "tp2-dp2": "--tensor-model-parallel-size 2",
}
# relative deviations allowed: of the losses, of the gradient norms
LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 6e-2)}


def train(folder: Path, start: Path | None, flags: list[str], processes: int) -> dict:
    """Train from the checkpoint ``start``; return losses, gradient norms, first-layer norms, sizes."""
    folder.mkdir()
    norms, log = folder / "norms.json", folder / "metrics.jsonl"
    launcher = tiny.torchrun(processes)
    load = ["--load", str(start), "--finetune"]
    result = tiny.run_python(
        [sys.executable, *launcher, str(WORKER), str(norms), *flags, *load, "--json-log", str(log)]
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    rows = tiny.rows(log)
    return {
        "losses": [row["loss"] for row in rows],
        "gradients": [row["grad_norm"] for row in rows],
        "first_layer": json.loads(norms.read_text()),
        "parameters": re.findall(r"(\d+) parameters, (\d+) without embeddings", result.stdout),
    }


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def single(request, dataset, tmp_path_factory):
    """Return dtype, flags, the shared initial checkpoint and the curve of one process."""
    folder = tmp_path_factory.mktemp(request.param)
    precision = ["--bf16"] if request.param == "bf16" else []
    flags = [*tiny.flags_for(dataset), *MODEL.split(), *precision]
    saved = tiny.run("pretrain", *flags, "--train-iters", "0", "--save", str(folder / "start"))
    assert saved.returncode == 0, saved.stderr
    return request.param, flags, folder / "start", train(folder / "one", folder / "start", flags, 1)


def deviation(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    assert len(values) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def check(single, tmp_path, layout: str, processes: int) -> None:
    dtype, flags, start, expected = single
    assert len(expected["losses"]) == STEPS
    assert expected["losses"][-1] < expected["losses"][0] - 0.1, "the run must learn, or curves say nothing"
    found = train(tmp_path / "run", start, [*flags, *layout.split()], processes)
    of_loss, of_gradient = LIMITS[dtype]
    measured = {
        "loss": deviation(found["losses"], expected["losses"]),
        "gradient norm": deviation(found["gradients"], expected["gradients"]),
    }
    if "distributed-optimizer" not in layout:  # each rank holds a shard of the gradients there
        names = sorted(expected["first_layer"])
        assert names == sorted(found["first_layer"])
        measured["first layer"] = deviation(
            [found["first_layer"][name] for name in names], [expected["first_layer"][name] for name in names]
        )
    print(dtype, layout, measured)
    assert len(found["parameters"]) == 1
    assert found["parameters"] == expected["parameters"]
    assert measured["loss"] < of_loss
    assert measured["gradient norm"] < of_gradient
    assert measured.get("first layer", 0.0) < of_gradient


@pytest.mark.parametrize("layout", TWO.values(), ids=TWO)
def test_two_processes(single, tmp_path, layout):
    check(single, tmp_path, layout, 2)


def test_documents_under_context_parallelism(dataset, tmp_path):
    """Documents begin in the middle of ranks' parts, which hold different numbers of tokens that count."""
    resets = "--reset-attention-mask --reset-position-ids --eod-mask-loss --calculate-per-token-loss"
    flags = [*tiny.flags_for(dataset), *MODEL.split(), *resets.split(), "--train-iters", "3"]
    flags += ["--seq-length", "64", "--max-position-embeddings", "64"]  # documents have 50 to 200 tokens
    found = {}
    for name, processes in (("one", 1), ("p2p", 2), ("a2a", 2)):
        cut = ["--context-parallel-size", "2", "--cp-comm-type", name] if processes > 1 else []
        done = tiny.run("pretrain", *flags, *cut, "--json-log", str(tmp_path / name), processes=processes)
        assert done.returncode == 0, done.stderr[-4000:]
        rows = tiny.rows(tmp_path / name)
        found[name] = [row["loss"] for row in rows], [row["grad_norm"] for row in rows]
    for name in ("p2p", "a2a"):
        assert deviation(found[name][0], found["one"][0]) < 1e-6
        assert deviation(found[name][1], found["one"][1]) < 1e-5


@pytest.mark.parametrize("layout", FOUR.values(), ids=FOUR)
def test_four_processes(single, tmp_path, layout):
    if single[0] != "fp32":
        pytest.skip("four processes on two cores: once, in fp32")
    check(single, tmp_path, layout, 4)
