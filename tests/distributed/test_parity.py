"""Every layout trains like one process: the same losses, gradient norms and first-layer gradients."""

from __future__ import annotations

import pytest

from tests.support import curves, on_version, tiny
from tests.support.curves import Curve, deviation

STEPS = 6
MODEL = (
    "--num-layers 4 --hidden-size 64 --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0 "
    f"--train-iters {STEPS} --eval-iters 0 --lr 2e-3 --no-plot"
)
TWO = {
    "tp2": "--tensor-model-parallel-size 2",
    "tp2-sp-linear-loss": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
    "pp2": "--pipeline-model-parallel-size 2",
    "pp2-interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "dp2": "--micro-batch-size 1",
    "dp2-distributed-optimizer": "--micro-batch-size 1 --use-distributed-optimizer",
    "cp2": "--context-parallel-size 2",
    "cp2-a2a": "--context-parallel-size 2 --cp-comm-type a2a",
}
FOUR = {
    "tp2-pp2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "tp2-dp2": "--tensor-model-parallel-size 2 --micro-batch-size 1",
    "cp4-a2a+p2p": "--context-parallel-size 4 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2",
}
# relative deviations allowed: of the losses, of the gradient norms
LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 6e-2)}
PRECISIONS = {"fp32": "", "bf16": "--bf16"}
# one of each way to divide the work in bf16, too
CASES = [("fp32", layout) for layout in TWO]
CASES += [("bf16", layout) for layout in ("tp2-sp-linear-loss", "pp2", "dp2-distributed-optimizer", "cp2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def flags(dataset):
    return [*tiny.flags_for(dataset), *MODEL.split()]


@pytest.fixture(scope="module")
def one(flags, folder):
    """Return the curve of one process by precision, from the checkpoint that all begin with."""
    return curves.train(folder / "one", flags, curves.from_one_start(folder / "start", PRECISIONS))


@pytest.fixture(scope="module")
def two(flags, folder, one):
    cases = {f"{precision}-{name}": f"{TWO[name]} {PRECISIONS[precision]}" for precision, name in CASES}
    return curves.train(folder / "two", [*flags, *curves.begin_with(folder / "start")], cases, 2)


@pytest.fixture(scope="module")
def four(flags, folder, one):
    """Return four processes' curves, in fp32 alone: there are two cores."""
    return curves.train(folder / "four", [*flags, *curves.begin_with(folder / "start")], FOUR, 4)


def check(expected: Curve, found: Curve, precision: str, layout: str) -> None:
    losses = expected.of("loss")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1, "the run must learn, or curves say nothing"
    of_loss, of_gradient = LIMITS[precision]
    measured = {
        "loss": deviation(found.of("loss"), losses),
        "gradient norm": deviation(found.of("grad_norm"), expected.of("grad_norm")),
    }
    if "distributed-optimizer" not in layout:  # each rank holds a shard of the gradients there
        names = sorted(expected.first_layer)
        assert names
        assert names == sorted(found.first_layer)
        measured["first layer"] = deviation(
            [found.first_layer[name] for name in names], [expected.first_layer[name] for name in names]
        )
    print(precision, layout, measured)
    assert found.sizes == expected.sizes
    assert measured["loss"] < of_loss
    assert measured["gradient norm"] < of_gradient
    assert measured.get("first layer", 0.0) < of_gradient


@pytest.mark.parametrize(("precision", "layout"), CASES)
def test_two_processes(one, two, precision, layout):
    check(one[precision], two[f"{precision}-{layout}"], precision, layout)


@pytest.mark.parametrize("layout", FOUR)
def test_four_processes(one, four, layout):
    check(one["fp32"], four[layout], "fp32", layout)


def test_documents_under_context_parallelism(dataset, tmp_path):
    """Documents begin in the middle of ranks' parts, which hold different numbers of tokens that count."""
    resets = "--reset-attention-mask --reset-position-ids --eod-mask-loss --calculate-per-token-loss"
    flags = [*tiny.flags_for(dataset), *MODEL.split(), *resets.split(), "--train-iters", "3"]
    flags += ["--seq-length", "64", "--max-position-embeddings", "64"]  # documents have 50 to 200 tokens
    (one,) = curves.train(tmp_path / "one", flags, {"one": ""}).values()
    cut = {way: f"--context-parallel-size 2 --cp-comm-type {way}" for way in ("p2p", "a2a")}
    for found in curves.train(tmp_path / "two", flags, cut, 2).values():
        assert deviation(found.of("loss"), one.of("loss")) < 1e-6
        assert deviation(found.of("grad_norm"), one.of("grad_norm")) < 1e-5


def test_interleaved_chunks_are_saved_and_loaded_where_a_global_has_their_number(flags, tmp_path) -> None:
    """With megatron-core 0.12: half of a run in two processes, from and to the files of one."""
    env = tiny.environment() | on_version.environment("0.12.1")
    rest = f"--train-iters 4 --load {tmp_path / 'chunks'}"
    half = f"--train-iters 4 {TWO['pp2-interleaved']} --exit-interval 2 --save {tmp_path / 'chunks'} "
    half += " ".join(curves.begin_with(tmp_path / "start"))
    alone = curves.from_one_start(tmp_path / "start", {"one": "--train-iters 4"})
    for folder, cases, processes in (
        (tmp_path / "alone", alone, 1),
        (tmp_path / "half", {"half": half}, 2),
        (tmp_path / "rest", {"rest": rest}, 1),
    ):
        curves.run(folder, flags, cases, processes, env)
    found = [
        curves.read(tmp_path / part, name).losses()
        for part, name in (("alone", "one"), ("half", "half"), ("rest", "rest"))
    ]
    assert deviation(found[1] + found[2], found[0]) < 1e-5


def test_parts_of_a_sequence_are_counted_once_with_0_12(flags, tmp_path) -> None:
    """Whose schedule multiplies a loss by the context-parallel size: Adam hides it, clipping does not."""
    env = tiny.environment() | on_version.environment("0.12.1")
    length = "--train-iters 3"
    cut = f"{length} --context-parallel-size 2 {' '.join(curves.begin_with(tmp_path / 'start'))}"
    whole = curves.from_one_start(tmp_path / "start", {"one": length})
    for folder, cases, processes in (("one", whole, 1), ("two", {"cp2": cut}, 2)):
        curves.run(tmp_path / folder, flags, cases, processes, env)
    one, two = curves.read(tmp_path / "one", "one"), curves.read(tmp_path / "two", "cp2")
    assert deviation(two.of("loss"), one.of("loss")) < 1e-6
    assert deviation(two.of("grad_norm"), one.of("grad_norm")) < 1e-5
