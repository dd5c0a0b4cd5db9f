"""A mixture of experts in the driver: every layout trains like one process, and goes on in another one."""

from __future__ import annotations

import re

import pytest

from tests.distributed.test_parity import deviation
from tests.end_to_end import tiny

pytest.importorskip("megatron.core")

MODEL = (
    "--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 "
    "--moe-shared-expert-gate --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --init-method-std 0.1 "
    "--disable-bias-linear --swiglu --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 "
    "--train-iters 6 --eval-iters 1 --no-plot"
)
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ep2-dp2": (4, "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
}


def train(flags: list[str], log, processes: int = 1) -> tuple[list[dict], str]:
    """Return the log's rows and what was printed."""
    done = tiny.run("pretrain", *flags, "--json-log", str(log), processes=processes)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return [*tiny.rows(log), *tiny.rows(log, "validation")], done.stdout


@pytest.fixture(scope="module")
def single(dataset, tmp_path_factory):
    """Return the flags, which load the shared initial checkpoint, and the curve of one process."""
    folder = tmp_path_factory.mktemp("experts")
    flags = [*tiny.flags_for(dataset), *MODEL.split()]
    train([*flags, "--train-iters", "0", "--save", str(folder / "start")], folder / "none")
    flags += ["--load", str(folder / "start"), "--finetune"]
    return flags, *train(flags, folder / "one")


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_like_one_process(single, tmp_path, processes, layout):
    flags, expected, told = single
    found, said = train([*flags, *layout.split()], tmp_path / "log", processes)
    assert expected[5]["loss"] < expected[0]["loss"] - 0.1, "the run must learn, or curves say nothing"
    for name, limit in (
        ("loss", 1e-5),
        ("load_balancing_loss", 1e-5),
        ("z_loss", 1e-5),
        ("grad_norm", 1e-4),
    ):
        ours, theirs = ([row[name] for row in rows if name in row] for rows in (found, expected))
        assert deviation(ours, theirs) < limit, name
    counted = r"(\d+) parameters, (\d+) without embeddings, (\d+) of them active \(2 of 4 experts\)"
    assert re.findall(counted, said) == re.findall(counted, told)
    total, _, active = map(int, re.findall(counted, told)[0])
    assert total - active == 2 * 2 * 3 * 32 * 24  # of each layer, two experts of three matrices are idle


def test_expert_parallelism_goes_on_bit_for_bit_and_in_another_layout(single, tmp_path):
    """With dropout, whose generators each expert-parallel rank has for itself."""
    flags = [flag for flag in single[0] if flag != "--finetune"]
    load = flags.index("--load")
    del flags[load : load + 2]
    flags += ["--hidden-dropout", "0.1", "--expert-model-parallel-size", "2"]
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "3"]
    whole, _ = train([*flags, *saved], tmp_path / "whole", 2)
    again = [*flags, "--load", str(tmp_path / "saved"), "--ckpt-step", "3"]
    rest, _ = train(again, tmp_path / "rest", 2)
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[3:]]
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    other, _ = train([*again, *layout.split()], tmp_path / "other", 2)
    assert deviation([row["loss"] for row in other], [row["loss"] for row in rest]) < 0.05
    refused = tiny.run("pretrain", *again, "--expert-model-parallel-size", "1")
    assert refused.returncode == 2
    assert "the optimizer keeps experts apart" in refused.stderr
