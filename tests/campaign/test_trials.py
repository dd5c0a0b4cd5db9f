"""Short forms of what tests/campaign tries on request: some trials of each kind, all of them noticed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.campaign import flips, resume, soak, strangers

pytest.importorskip("megatron.core")


def test_a_flipped_bit_of_what_train_goes_on_from_is_noticed(tmp_path: Path) -> None:
    kinds = {"tracker", "checkpoint: run.json"}
    found = list(flips.trials(tmp_path, random.Random(1), ways="train", only=kinds))
    assert {outcome.kind for outcome in found} == {f"train: {kind}" for kind in kinds}
    assert all(outcome.noticed for outcome in found), found


def test_a_changed_flag_is_noticed(tmp_path: Path) -> None:
    found = list(resume.trials(tmp_path, random.Random(1), {"adam_beta2", "seed", "num_layers"}))
    assert [outcome.noticed.split(":")[0] for outcome in found] == ["refused", "said", "said"], found


def test_nothing_of_a_strangers_folder_is_run(tmp_path: Path) -> None:
    [outcome] = itertools.islice(strangers.trials(tmp_path, random.Random(1)), 1)
    assert outcome.noticed == "nothing was run"


def test_what_grows_is_told() -> None:
    samples = [
        {"who": who, "pid": 1, "age": 60.0, "rss": 100 + at * (who == "serve"), "fds": 9, "threads": 2}
        | {"children": 0, "cpu": at * 0.5, "at": float(at), "processes": 4, "iteration": at * 2}
        for at in range(100)
        for who in ("serve", "pretrain")
    ]
    rows = {(who, what): (first, last) for who, what, first, last in soak.compared(samples, 20)}
    assert rows["serve", "rss"] == (110, 189.5)
    assert rows["pretrain", "rss"] == (100, 100)
    assert rows["pretrain", "ms of a processor for a step"] == (250, 250)
    assert rows["all", "processes"] == (4, 4)
