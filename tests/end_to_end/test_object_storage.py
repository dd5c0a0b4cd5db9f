"""A disk that is lost costs nothing, if checkpoints are copied to a storage, which is a folder here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import tiny, train_runs

pytest.importorskip("megatron.core")
SCRIPT = Path(__file__).parents[1] / "finetune" / "scripts" / "dropout.py"
TRAIN = "--micro-batch-size 2 --global-batch-size 12 --lr 1e-2 --log-interval 1 --no-plot".split()


@pytest.mark.parametrize(("command", "processes"), [("pretrain", 2), ("train", 1)])
def test_a_run_resumes_from_the_storage_when_its_disk_is_lost(command, processes, tmp_path) -> None:
    if command == "pretrain":
        words = ["pretrain", *tiny.flags_for(tiny.write_dataset(tmp_path / "numbers"))]
        run, half = tiny.run, ["--exit-interval", "4"]
    else:
        words = ["--user-script", str(SCRIPT), *TRAIN, "--lr-decay-iters", "6", "--train-iters", "6"]
        run, half = train_runs.train, ["--train-iters", "4"]
    whole = run(*words, "--save", str(tmp_path / "whole"), processes=processes)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    disk, storage = tmp_path / "disk", tmp_path / "storage"
    flags = ["--save", str(disk), "--load", str(disk), "--save-interval", "2"]
    flags += ["--object-storage", f"file://{storage}"]
    first = run(*words, *flags, *half, processes=processes)
    assert first.returncode == 0, first.stdout + first.stderr
    assert sorted(path.parent.name for path in storage.glob("*/_SUCCESS")) == ["iter_0000002", "iter_0000004"]
    shutil.rmtree(disk)
    (storage / "iter_0000004" / "_SUCCESS").unlink()  # as if the run had been killed in its copy
    second = run(*words, *flags, processes=processes)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resuming from iteration 2" in second.stdout
    assert (storage / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    resumed, expected = (tiny.losses(each / "metrics.jsonl") for each in (disk, tmp_path / "whole"))
    assert resumed == {number: loss for number, loss in expected.items() if number > 2}
