"""The ``pretrain_gpt.py`` of bigscience's Megatron-DeepSpeed, unedited: it trains like Megatron-LM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_npu import patch_commands, upstream
from tests.adaptors.megatron_lm import runs
from tests.conftest import checkout as find_or_skip

pytest.importorskip("deepspeed")

ITERATIONS, SAVED = 6, 4
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 32"


@pytest.fixture(scope="module")
def checkout() -> Path:
    return find_or_skip("megatron_deepspeed", upstream.BIGSCIENCE_VERSION)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with a vocabulary and a GPT dataset."""
    folder = tmp_path_factory.mktemp("data")
    runs.write_vocabulary(folder)
    runs.write_dataset(folder / "text")
    return folder


def train(tree: Path, data: Path, *changes: str, processes: int = 1) -> dict[int, float]:
    """Return the losses of a run of a tree's own script."""
    flags = [*runs.flags(data), "--train-iters", str(ITERATIONS), *" ".join(changes).split()]
    return runs.losses(runs.succeeded(runs.run(tree / "pretrain_gpt.py", flags, processes=processes)))


def engine(folder: Path, stage: int) -> str:
    """Write a configuration of DeepSpeed; return the flags that name it."""
    path = folder / f"stage-{stage}.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": runs.BATCH}
    path.write_text(json.dumps({**sizes, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}))
    return f"--deepspeed --deepspeed_config {path} --zero-stage {stage}"


@pytest.fixture(scope="module")
def expected(data) -> dict[int, float]:
    """The curve of Megatron-LM 285068c8."""
    return train(find_or_skip("megatron_lm", upstream.LEGACY_VERSION), data)


def test_every_patch_fits(checkout):
    verdicts = patch_commands.verdicts(upstream.find(checkout))
    assert verdicts
    assert {verdict.status for verdict in verdicts} == {"same"}


@pytest.mark.parametrize(
    ("changes", "stage", "processes"),
    [("", None, 1), (TP2, None, 2), ("", 0, 1), ("", 1, 2), (TP2, 0, 2)],
    ids=["one", "tp2", "engine", "engine-dp2-zero-1", "engine-tp2"],
)
def test_it_trains_like_megatron_lm(checkout, data, expected, changes, stage, processes):
    changes += "" if stage is None else f" {engine(data, stage)}"
    assert train(checkout, data, changes, processes=processes) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [None, 1], ids=["upstream's", "engine's"])
def test_it_goes_on_from_its_checkpoint(checkout, data, expected, stage, tmp_path):
    changes = "" if stage is None else engine(data, stage)
    train(checkout, data, changes, f"--save {tmp_path} --save-interval {SAVED} --exit-interval {SAVED}")
    found = train(checkout, data, changes, f"--load {tmp_path}")
    assert found == pytest.approx({i: expected[i] for i in range(SAVED + 1, ITERATIONS + 1)}, rel=1e-5)
