"""How long a run trains: iterations, samples, epochs; and where it goes on."""

from __future__ import annotations

import itertools
import multiprocessing

import pytest

from megatron_npu.pretrain.data import datasets
from megatron_npu.pretrain.flags import arguments, validation
from megatron_npu.pretrain.flags.plan_parts import BatchFlags, DatasetFlags
from megatron_npu.pretrain.run import initialize, pretrain
from tests.support import tiny

pytest.importorskip("megatron.core")


@pytest.fixture
def few(tmp_path):
    """A dataset of some 30 samples."""
    return tiny.write_dataset(tmp_path / "few", documents=8)


@pytest.fixture
def train_for(flags):
    """Return a function: flags, without any for the length of a run -> summary."""
    argv = flags()
    at = argv.index("--train-iters")
    rest = [*argv[:at], *argv[at + 2 :], "--eval-iters", "0", "--split", "1"]
    return lambda *changes: pretrain.train(arguments.parse([*rest, *map(str, changes)]))


def test_samples_are_iterations_of_a_schedule_that_counts_samples(train_for, tmp_path):
    train_for("--json-log", tmp_path / "iterations", "--train-iters", 6)
    train_for("--json-log", tmp_path / "same", "--train-samples", 24)
    assert tiny.losses(tmp_path / "same") == tiny.losses(tmp_path / "iterations")
    summary = train_for("--json-log", tmp_path / "more", "--train-samples", 27)
    assert (summary.iterations, summary.consumed_samples) == (6, 24)  # the rest is no global batch
    rates = {row["iteration"]: row["learning_rate"] for row in tiny.rows(tmp_path / "more")}
    assert rates[6] == pytest.approx(1e-2 * (1 - 24 / 27))  # Megatron decays over --train-samples


def test_an_epoch_is_what_the_documents_give_once(train_for, few, tmp_path):
    one = train_for("--data-path", few, "--epochs", 1, "--global-batch-size", 1)
    samples = one.consumed_samples
    assert samples == (_tokens(few) - 1) // 32
    three = train_for("--data-path", few, "--epochs", 3, "--json-log", tmp_path / "m", "--log-interval", 1)
    assert three.consumed_samples == 3 * samples // 4 * 4
    assert [row["epoch"] for row in tiny.rows(tmp_path / "m")][1] == 8 / samples


def _tokens(prefix):
    return int(tiny.indexed_dataset.sequence_lengths(prefix).sum())


@pytest.mark.parametrize("kind", ["one", "two", "weighted", "parts", "split"])
def test_megatrons_dataset_has_the_samples_of_one_epoch(flags, few, tmp_path, kind):
    other = tiny.write_dataset(tmp_path / "other", documents=5, seed=1)
    source = {
        "one": ["--data-path", few],
        "two": ["--data-path", few, other],
        "weighted": ["--data-path", 0.25, few, 0.75, other],
        "parts": ["--data-path", "--train-data-path", few, other],
        "split": ["--data-path", few, other, "--split", "70,30"],
    }[kind]
    argv = flags("--eval-iters", 0, "--epochs", 2, "--split", "1", *source)
    at = argv.index("--train-iters")
    del argv[at : at + 2]
    if kind == "parts":
        for _ in range(2):
            at = argv.index("--split")
            del argv[at : at + 2]
    args = validation.check(arguments.parse(argv))
    with initialize.session(args):
        built = len(datasets.datasets(DatasetFlags.of(args)).train)
    if kind == "weighted":
        assert args.epoch_samples <= built <= args.epoch_samples + 2  # each part is rounded up
    else:
        assert built == args.epoch_samples


def test_each_epoch_has_all_samples_in_an_order_of_its_own(flags, few):
    argv = flags(
        "--data-path", few, "--eval-iters", 0, "--split", "1", "--epochs", 2, "--global-batch-size", 1
    )
    at = argv.index("--train-iters")
    args = validation.check(arguments.parse([*argv[:at], *argv[at + 2 :]]))
    with initialize.session(args):
        (batches,) = datasets.training_batches(
            BatchFlags.of(args), datasets.datasets(DatasetFlags.of(args)).train, 0
        )
        epochs = [
            [
                tuple(batch["tokens"].flatten().tolist())
                for batch in itertools.islice(batches, args.epoch_samples)
            ]
            for _ in range(2)
        ]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_epochs_go_on_in_the_middle_of_one(train_for, few, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("--data-path", few, "--epochs", 2)
    summary = train_for("--save", whole, *common)
    assert summary.iterations > 9  # of about 7 an epoch
    train_for("--save", parts, "--load", parts, "--exit-interval", 9, *common)
    train_for("--save", parts, "--load", parts, *common)
    one, other = whole / "metrics.jsonl", parts / "metrics.jsonl"
    assert tiny.losses(one) == tiny.losses(other)
    assert [row["epoch"] for row in tiny.rows(one)] == [row["epoch"] for row in tiny.rows(other)]
    last = f"iter_{summary.iterations:07d}"
    assert tiny.differences(whole / last, parts / last) == []


def test_a_run_by_samples_that_goes_on_with_another_batch_ends_at_the_samples(train_for, tmp_path):
    save = ("--save", tmp_path, "--load", tmp_path, "--train-samples", 24)
    train_for(*save, "--exit-interval", 2)  # 8 samples
    summary = train_for(*save, "--global-batch-size", 8)
    assert (summary.iterations, summary.consumed_samples) == (4, 24)


def test_any_checkpoint_can_be_gone_on_from(train_for, tmp_path, capsys):
    first, again = tmp_path / "first", tmp_path / "again"
    train_for("--save", first, "--train-iters", 6, "--save-interval", 2)
    train_for("--save", again, "--load", first, "--ckpt-step", 4, "--train-iters", 6)
    assert "resuming from iteration 4" in capsys.readouterr().out
    expected = tiny.losses(first / "metrics.jsonl")
    assert tiny.losses(again / "metrics.jsonl") == {number: expected[number] for number in (5, 6)}
    assert tiny.differences(first / "iter_0000006", again / "iter_0000006") == []


def test_a_checkpoint_that_is_not_there_or_would_be_written_over(train_for, flags, refused, tmp_path):
    train_for("--save", tmp_path, "--train-iters", 4, "--save-interval", 2)
    argv = ["pretrain", *flags("--load", tmp_path)]
    assert "--ckpt-step 3: there is no iter_0000003" in (line := refused(*argv, "--ckpt-step", 3))
    assert "2, 4" in line
    line = refused(*argv, "--ckpt-step", 2, "--save", tmp_path)
    assert "later iterations than --ckpt-step 2, which the run would overwrite: 4" in line


def test_parts_of_their_own_are_what_the_files_hold(train_for, few, dataset, tmp_path, capsys):
    """The same documents by another way: all of a file for training, all of another for validation."""
    other = tiny.write_dataset(tmp_path / "other", documents=9, seed=3)
    train_for("--json-log", tmp_path / "shared", "--train-iters", 6, "--data-path", few)
    argv = [word for word in _without(few) if word]
    own = ("--train-data-path", few, "--valid-data-path", 1, other, 2, few, "--test-data-path", other)
    argv += [*map(str, own), "--eval-iters", "2", "--train-iters", "6", "--json-log", str(tmp_path / "own")]
    summary = pretrain.train(arguments.parse(argv))
    assert tiny.losses(tmp_path / "own") == tiny.losses(tmp_path / "shared")
    (test,) = tiny.rows(tmp_path / "own", "test")
    assert test["loss"] == summary.test_loss != summary.validation_loss
    assert "validation loss at iteration 6 on test set |" in capsys.readouterr().out


def _without(prefix):
    """The tiny run's flags without those for its data and length."""
    argv = tiny.flags_for(prefix)
    for flag in ("--data-path", "--split", "--train-iters"):
        at = argv.index(flag)
        del argv[at : at + 2]
    return argv


def test_parts_of_their_own_need_data_for_validation(refused, few):
    argv = ["pretrain", *_without(few), "--train-iters", "6", "--train-data-path", str(few)]
    assert "--train-data-path requires --valid-data-path" in refused(*argv)
    line = refused(*argv, "--valid-data-path", few, "--test-data-path", f"{few}-is-not-there")
    assert "few-is-not-there" in line


def test_a_run_ends_the_processes_that_read_its_data(train):
    """Otherwise Python's collector ends them in a later run, and waits 5 s for each."""
    train("--num-workers", 1, "--train-iters", 1, "--eval-iters", 0)
    assert multiprocessing.active_children() == []
