"""A global batch that grows: what is trained, logged and gone on from, in one process and in two."""

from __future__ import annotations

import pytest

from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import pretrain
from megatron_npu.pretrain.run.losses.expert_losses import ExpertLosses
from tests.support import curves, tiny

pytest.importorskip("megatron.core")

SIZES = [2, 2, 2, 4, 4, 6, 8, 8, 8]  # 44 samples
LENGTH = "--train-samples 47 --eval-iters 0 --lr-decay-style cosine"
RAMP = "--rampup-batch-size 2 2 18 --global-batch-size 8"


@pytest.fixture(scope="module")
def steady(dataset) -> list[str]:
    """Return the flags of a run with dropout, by samples."""
    argv = tiny.flags_for(dataset)
    at = argv.index("--train-iters")
    return [*argv[:at], *argv[at + 2 :], *LENGTH.split()]


@pytest.fixture(scope="module")
def ramping(steady) -> list[str]:
    """Return the flags of the same, whose batch grows."""
    return [*steady, *RAMP.split()]


@pytest.fixture
def train(ramping, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    return lambda *words: pretrain.train(arguments.parse([*ramping, *map(str, words)]))


@pytest.fixture
def train_in_twos(train, steady):
    """Return a function: changes to the flags -> summary of a run whose batch is always 2."""
    flags = [*steady, "--global-batch-size", "2"]
    return lambda *words: pretrain.train(arguments.parse([*flags, *map(str, words)]))


def totals(sizes: list[int]) -> list[int]:
    return [sum(sizes[: count + 1]) for count in range(len(sizes))]


def test_each_iteration_takes_its_samples(train, tmp_path, capsys):
    summary = train("--json-log", tmp_path / "m", "--log-interval", 1)
    rows = tiny.rows(tmp_path / "m")
    assert [row["global_batch_size"] for row in rows] == SIZES
    assert [row["consumed_samples"] for row in rows] == totals(SIZES)
    assert (summary.iterations, summary.consumed_samples) == (9, 44)
    said = capsys.readouterr().out
    assert " 2 to 8 micro batches of 1 x 32 tokens" in said
    assert " global batch size:     6 | " in said


def test_the_schedule_counts_the_samples_that_were_used(train, train_in_twos, tmp_path):
    """The rates of a run of two samples an iteration, at the same numbers of samples."""
    train("--json-log", tmp_path / "ramp")
    train_in_twos("--json-log", tmp_path / "twos")
    ramp, twos = (
        {row["consumed_samples"]: row["learning_rate"] for row in tiny.rows(tmp_path / name)}
        for name in ("ramp", "twos")
    )
    assert len(ramp) == len(SIZES)
    assert ramp == {at: twos[at] for at in ramp}


def test_a_larger_batch_is_the_mean_of_its_samples(train, train_in_twos, tmp_path):
    """Of weights that stay: each loss is the mean of those of the same samples, two by two."""
    still = ("--lr", 0, "--hidden-dropout", 0, "--attention-dropout", 0)
    train("--json-log", tmp_path / "ramp", *still)
    train_in_twos("--json-log", tmp_path / "twos", *still)
    twos = [row["loss"] for row in tiny.rows(tmp_path / "twos")]
    at = 0
    for row, size in zip(tiny.rows(tmp_path / "ramp"), SIZES, strict=True):
        mean = sum(twos[at // 2 : (at + size) // 2]) / (size // 2)
        assert row["loss"] == pytest.approx(mean, rel=1e-6)
        at += size


def test_a_run_goes_on_in_the_middle_of_a_step_to_the_bit(train, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train("--save", whole)
    train("--save", parts, "--load", parts, "--exit-interval", 5)
    train("--save", parts, "--load", parts)
    one, other = whole / "metrics.jsonl", parts / "metrics.jsonl"
    assert tiny.losses(one) == tiny.losses(other)
    assert [row["global_batch_size"] for row in tiny.rows(other)] == SIZES
    assert tiny.differences(whole / "iter_0000009", parts / "iter_0000009") == []


def test_two_processes_go_on_in_it_as_one_trains(ramping, tmp_path):
    words = "--hidden-dropout 0 --attention-dropout 0 --log-interval 3"
    one = curves.train(tmp_path / "one", ramping, {"one": words})["one"]
    cases = {
        "whole": f"{words} --save {tmp_path / 'whole'}",
        "begun": f"{words} --save {tmp_path / 'parts'} --exit-interval 4",
        "rest": f"{words} --save {tmp_path / 'parts'} --load {tmp_path / 'parts'}",
    }
    two = curves.train(tmp_path / "two", ramping, cases, 2)
    whole = [loss for row in two["whole"].of("losses") for loss in row]
    parts = [loss for name in ("begun", "rest") for row in two[name].of("losses") for loss in row]
    assert len(whole) == 9
    assert parts == whole
    alone = [loss for row in one.of("losses") for loss in row]
    assert curves.deviation(whole, alone) < 1e-5
    assert tiny.differences(tmp_path / "whole/iter_0000009", tmp_path / "parts/iter_0000009") == []


def test_experts_losses_are_means_over_the_forward_passes_that_there_were(train, tmp_path):
    """Each is about 1 where the router is balanced; a sum over another number of passes would not be."""
    experts = "--num-experts 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01".split()
    train("--json-log", tmp_path / "m", "--log-interval", 4, *experts, "--disable-bias-linear")
    found = [row["load_balancing_loss"] for row in tiny.rows(tmp_path / "m")]
    assert len(found) > 2
    assert found == pytest.approx([1.0] * len(found), abs=0.3)


def test_experts_of_layers_of_prediction_have_losses_of_their_own(steady, tmp_path, monkeypatch):
    """Three layers, each about 1: megatron-core up to 0.16 adds the third one's to the first's."""
    taken: list[list[float]] = []
    take = ExpertLosses.take

    def noting(losses: ExpertLosses, micro_batches: int) -> dict[str, list[float]]:
        found = take(losses, micro_batches)
        taken.append(found["load_balancing_loss"])
        return found

    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    monkeypatch.setattr(ExpertLosses, "take", noting)
    experts = "--num-experts 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
    more = "--disable-bias-linear --mtp-num-layers 1 --position-embedding-type rope --global-batch-size 16"
    pretrain.train(arguments.parse([*steady, *experts.split(), *more.split()]))
    assert taken == [pytest.approx([1.0] * 3, abs=0.3)] * 2
