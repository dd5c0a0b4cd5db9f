"""Validation data that are read whole, and several sets with a loss each."""

from __future__ import annotations

import pytest

from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import pretrain
from tests.support import curves, tiny

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def parts(dataset, tmp_path_factory):
    """Return two sets of documents, whose samples no batch of 4 divides."""
    folder, sizes = tmp_path_factory.mktemp("parts"), {"first": 3, "second": 5}
    return [tiny.write_dataset(folder / name, documents=n, seed=n) for name, n in sizes.items()]


@pytest.fixture(scope="module")
def own(dataset, parts) -> list[str]:
    """Return the flags of a run with data of its own for each part."""
    argv = tiny.flags_for(dataset)
    for flag in ("--data-path", "--split"):
        at = argv.index(flag)
        del argv[at : at + 2]
    return [*argv, "--train-data-path", str(dataset), "--valid-data-path", *map(str, parts)]


@pytest.fixture
def train(own, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    return lambda *words: pretrain.train(arguments.parse([*own, *map(str, words)]))


def samples(prefix) -> int:
    return (int(tiny.indexed_dataset.sequence_lengths(prefix).sum()) - 1) // 32


def test_a_whole_set_is_the_mean_of_all_its_samples(train, parts, tmp_path):
    """Whatever the batch: what fills the last one does not count. Judge: as many batches of one sample."""
    count = samples(parts[0])
    assert count % 4
    still = ("--valid-data-path", parts[0], "--train-iters", 1)
    alone = ("--global-batch-size", 1, "--eval-iters", count)
    expected = train(*still, "--train-iters", 0, "--save", tmp_path / "w", "--eval-iters", 0)
    assert expected.validation_loss is None
    load = ("--load", tmp_path / "w", "--finetune", "--lr", 0)
    each = train(*still, *alone, *load).validation_loss
    for words in (["--eval-iters", 0], ["--micro-batch-size", 2, "--eval-iters", 1]):
        found = train(*still, *load, "--full-validation", *words)
        assert found.validation_loss == pytest.approx(each, rel=1e-6)
    assert train(*still, *load, "--eval-iters", 1).validation_loss != pytest.approx(each, rel=1e-4)


def test_each_set_has_its_loss(train, parts, tmp_path, capsys):
    words = ("--multiple-validation-sets", "--full-validation", "--lr", 0, "--eval-interval", 3)
    summary = train(*words, "--json-log", tmp_path / "m")
    assert list(summary.validation_losses) == [str(part) for part in parts]
    one, other = summary.validation_losses.values()
    assert one != other
    assert summary.validation_loss == pytest.approx((one + other) / 2)
    for part, loss in zip(parts, (one, other), strict=True):
        again = train("--full-validation", "--lr", 0, "--valid-data-path", part)
        assert again.validation_loss == pytest.approx(loss, rel=1e-6)
    first, last = tiny.rows(tmp_path / "m", "validation")
    assert [row["data"] for row in last["sets"]] == [str(part) for part in parts]
    assert first["sets"] == last["sets"], "of weights that stay, and from its beginning each time"
    said = capsys.readouterr().out
    assert f" validation-0 loss at iteration 6 | lm loss value: {one:.6E} | lm loss PPL: " in said
    assert f" validation-1 loss at iteration 3 | lm loss value: {other:.6E} | lm loss PPL: " in said


def test_some_batches_of_each_set_go_on_where_a_run_goes_on(train, tmp_path):
    words = ("--multiple-validation-sets", "--eval-interval", 2, "--eval-iters", 2)
    train(*words, "--save", tmp_path / "whole")
    train(*words, "--save", tmp_path / "parts", "--exit-interval", 3)
    train(*words, "--save", tmp_path / "parts", "--load", tmp_path / "parts")
    whole, parts = (
        [
            (row["iteration"], row["sets"])
            for row in tiny.rows(tmp_path / name / "metrics.jsonl", "validation")
        ]
        for name in ("whole", "parts")
    )
    assert [iteration for iteration, _ in whole] == [2, 4, 6]
    assert parts == whole


def test_two_processes_measure_the_same(own, tmp_path):
    words = "--multiple-validation-sets --full-validation --train-iters 2 --hidden-dropout 0 "
    words += "--attention-dropout 0"
    one = curves.train(tmp_path / "one", own, {"one": words})["one"]
    layouts = {"dp": "", "tp": "--tensor-model-parallel-size 2", "pp": "--pipeline-model-parallel-size 2"}
    two = curves.train(tmp_path / "two", own, {name: f"{words} {more}" for name, more in layouts.items()}, 2)
    for name in ("dp", "tp"):
        (expected,), (found,) = one.of("sets"), two[name].of("sets")
        assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    ((first, second),) = two["pp"].of("sets")  # whose initial weights are others
    assert 0 < first["loss"] != second["loss"] > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--full-validation --mock-data", "--full-validation cannot be used with --mock-data"),
        ("--multiple-validation-sets", "--multiple-validation-sets requires --valid-data-path"),
        (
            "--full-validation --data-path 1 {data} 2 {data}",
            "--full-validation does not support weights in --data-path",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused(refused, dataset, words, named):
    argv = tiny.flags_for(dataset)
    if "data-path" in words or "mock" in words:
        at = argv.index("--data-path")
        del argv[at : at + 2]
    assert named in refused("pretrain", *argv, *words.format(data=dataset).split())
