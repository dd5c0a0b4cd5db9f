"""A GPT trained on simulated NPUs, alone and in parallel over HCCL, has the loss curve of one CPU process."""

from __future__ import annotations

import json

import pytest

from tests.distributed import curves
from tests.end_to_end import tiny
from tests.end_to_end.conftest import dataset

__all__ = ["dataset"]

STEPS = 10
MODEL = (
    "--num-layers 4 --hidden-size 64 --attention-dropout 0 --hidden-dropout 0 "
    f"--train-iters {STEPS} --eval-iters 0 --lr 1e-3 --no-plot"
).split()
LIMIT = 1e-4  # relative, fp32
ALONE = {"one": ""}
TWO = {
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("npus")


@pytest.fixture(scope="module")
def flags(dataset):
    return [*tiny.flags_for(dataset), *MODEL]


@pytest.fixture(scope="module")
def expected(flags, folder) -> list[float]:
    """Return the losses of one CPU process, from the checkpoint that all begin with."""
    cases = curves.from_one_start(folder / "start", ALONE)
    return curves.train(folder / "cpu", flags, cases)["one"].of("loss")


@pytest.fixture(scope="module")
def on_npus(simulated, flags, folder, expected):
    """Return a function: cases, number of NPUs -> the losses of each, and what each NPU has counted."""

    def train(cases: dict[str, str], npus: int) -> tuple[dict[str, list[float]], list[dict]]:
        place = folder / str(npus)
        place.mkdir()
        report = {"MEGATRON_NPU_SIM_REPORT": str(place / "report.json")}
        line = curves.command(place, [*flags, *curves.begin_with(folder / "start")], cases, npus)
        done = simulated("python", *line, MEGATRON_NPU_SIM_HCCL_TIMEOUT="120", **report)
        assert done.returncode == 0, done.stdout[-6000:]
        counted = [json.loads(file.read_text()) for file in sorted(place.glob("report*.json"))]
        assert len(counted) == npus
        assert all("npu::npu_fusion_attention" in counts["launches"] for counts in counted)
        return {name: curves.read(place, name).of("loss") for name in cases}, counted

    return train


def check(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.05, "the run must learn, or curves say nothing"
    deviation = curves.deviation(losses, expected)
    print("deviates by", deviation)
    assert deviation < LIMIT


def test_one_npu(on_npus, expected):
    losses, _ = on_npus(ALONE, 1)
    check(losses["one"], expected)


def test_two_npus(on_npus, expected):
    losses, counted = on_npus(TWO, 2)
    for name in TWO:
        check(losses[name], expected)
    for counts in counted:
        for name in ("AllReduce", "AllGather", "ReduceScatter", "BatchSendRecv"):
            assert counts["communication"][name]["calls"] >= STEPS, (name, counts["communication"])
