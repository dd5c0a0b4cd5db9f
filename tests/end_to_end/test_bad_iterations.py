"""Batches that are poisoned: said, left out, gone back from; what comes of a device is told from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_npu.pretrain.data import datasets as data
from megatron_npu.pretrain.run import bad_iterations, divergence, loop
from megatron_npu.pretrain.run.divergence import DivergedError
from tests.support import tiny

pytest.importorskip("megatron.core")

POISON = range(48, 56)  # samples of the iterations 13 and 14, four in each
FLAGS = "--train-iters 17 --lr 3e-2 --eval-iters 0 --log-interval 6".split()


class Poisoned(torch.utils.data.Dataset):
    """A dataset some of whose samples are noise to predict, or have a loss that is none.

    Args:
        whole: the dataset.
        poison: ``noise``, ``nan`` or ``none``.
    """

    def __init__(self, whole: Any, poison: str) -> None:
        self.whole, self.poison = whole, poison

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = dict(self.whole[number])
        if number in POISON and self.poison == "nan":
            sample["loss_mask"] = sample["loss_mask"] * float("nan")
        elif number in POISON and self.poison == "noise":
            sample["labels"] = (sample["labels"] + 97) % tiny.SIZE  # nothing that it can have learnt
        return sample


@pytest.fixture
def poisoned(train, monkeypatch) -> Callable[..., Any]:
    """Return a function: the poison, flags -> the summary of a run on it."""
    build = data.datasets
    monkeypatch.setattr(divergence, "ENOUGH", 8)
    monkeypatch.setattr(divergence, "FAR", 2.0)  # a short run still learns: its usual losses are far apart

    def run(poison: str, *flags: object) -> Any:
        def datasets(args: Any) -> data.Datasets:
            found = build(args)
            return found._replace(train=Poisoned(found.train, poison))

        with monkeypatch.context() as patch:
            patch.setattr(data, "datasets", datasets)
            return train(*FLAGS, *flags)

    return run


def losses(path: Path) -> list[float]:
    return [loss for row in tiny.rows(path) for loss in row["losses"]]


def said(out: str, words: str) -> list[str]:
    return [line for line in out.splitlines() if words in line]


def test_a_spike_is_said_or_left_out(poisoned, tmp_path, capsys):
    poisoned("noise", "--json-log", tmp_path / "note")
    assert len(said(capsys.readouterr().out, "loss spike at iteration 13: ")) == 1
    poisoned("noise", "--json-log", tmp_path / "skip", "--loss-spike-policy", "skip")
    lines = said(capsys.readouterr().out, "its update is skipped")
    assert [line.split(":")[0] for line in lines] == [f" loss spike at iteration {n}" for n in (13, 14)]
    note, skip = losses(tmp_path / "note"), losses(tmp_path / "skip")
    assert skip[:13] == note[:13]  # the update of 13 is the first that is missing
    assert skip[13] != note[13]
    assert [row["skipped_iterations"] for row in tiny.rows(tmp_path / "skip")][-1] == 2


def test_a_loss_that_is_none_costs_no_weight(poisoned, tmp_path, capsys):
    with pytest.raises(DivergedError, match="nan at iteration 13"):
        poisoned("nan")
    still = "--attention-dropout 0 --hidden-dropout 0".split()  # else other random numbers follow
    skipping = "--loss-spike-policy skip --rerun-mode validate_results".split()
    poisoned("nan", "--json-log", tmp_path / "nan", *still, *skipping)
    assert (
        len(
            said(
                capsys.readouterr().out,
                "iteration 13; repeating the iteration gave the same result: its update",
            )
        )
        == 1
    )
    assert losses(tmp_path / "nan")[12:14] == [None, None]
    # as if the two had never been: their data are passed over, their updates left out
    poisoned("nan", "--json-log", tmp_path / "passed", *still, "--iterations-to-skip", 12, 13)
    rows = tiny.rows(tmp_path / "passed")
    assert losses(tmp_path / "passed") == [loss for loss in losses(tmp_path / "nan") if loss is not None]
    assert rows[-1]["iteration"] == 17
    assert rows[-1]["consumed_samples"] == 68


def test_a_run_goes_back_and_leaves_the_data_since_out(poisoned, train, flags, tmp_path, capsys):
    save = tmp_path / "checkpoints"
    rewinding = ["--loss-spike-policy", "rewind", "--save", save, "--save-interval", 11]
    summary = poisoned("noise", *rewinding)
    lines = said(capsys.readouterr().out, "returned to")
    line = lines[0]
    assert line.startswith(" loss spike at iteration 13: ")
    assert line.endswith(f"{save / 'iter_0000011'}; samples 44 to 51 are skipped")
    # the samples 52 to 55 come first then, and are poisoned as well: back once more
    assert [line.split(":")[0] for line in lines] == [f" loss spike at iteration {n}" for n in (13, 12)]
    assert summary.iterations == 17
    assert summary.consumed_samples == 17 * 4 + 2 * 4 + 4


def test_what_cannot_be_computed_twice_is_not_the_data(poisoned, monkeypatch, capsys):
    """A device that computes wrongly once: the second result counts, and the curve is that of a sound one."""
    sound = poisoned("none", "--rerun-mode", "validate_results")
    forward, calls = loop.Trainer._forward, []

    def wrong(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        sums = forward(self, *args, **kwargs)
        calls.append(None)
        return sums * torch.tensor([float("inf"), 1.0]) if len(calls) == 12 else sums

    monkeypatch.setattr(loop.Trainer, "_forward", wrong)
    capsys.readouterr()
    summary = poisoned("none", "--rerun-mode", "validate_results")
    (line,) = said(capsys.readouterr().out, "repeating the iteration")
    assert line.startswith(" the loss is inf at iteration 12; repeating the iteration gave a loss of ")
    assert "which differs on rank 0 (" in line
    assert len(calls) == 18
    assert summary.loss_last == sound.loss_last


def test_neither_goes_on_for_ever(poisoned, monkeypatch, tmp_path):
    monkeypatch.setattr(bad_iterations, "LEFT_OUT", 1)
    with pytest.raises(DivergedError, match="of the previous 1 iterations were skipped"):
        poisoned("nan", "--loss-spike-policy", "skip")
    monkeypatch.setattr(bad_iterations, "GONE_BACK", 1)
    with pytest.raises(DivergedError, match="returned to iteration 12 1 times"):
        poisoned("nan", "--loss-spike-policy", "rewind", "--save", tmp_path, "--save-interval", 12)


def test_going_back_needs_checkpoints(refused, flags, tmp_path):
    rewinding = ["pretrain", *flags("--loss-spike-policy", "rewind")]
    assert "requires --save DIR and --save-interval N" in refused(*rewinding)
    saving = [*rewinding, "--save", tmp_path, "--save-interval", 1]
    assert "--no-save-optim" in refused(*saving, "--no-save-optim")
