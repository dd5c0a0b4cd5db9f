"""The ``pretrain_gpt.py`` of bigscience's Megatron-DeepSpeed, unedited: it trains like Megatron-LM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_npu.checkpoint_files import checksums
from megatron_npu.commands import patches
from megatron_npu.upstream import megatrons
from tests.conftest import checkout as find_or_skip
from tests.support import stock_lm
from tests.support.deepspeed_pretraining import (
    ITERATIONS,
    RARELY,
    TP2,
    engine,
    split_into_stages,
    steps,
    train,
    train_sentences,
)
from tests.support.payload import Runs

pytest.importorskip("deepspeed")

SAVED = 4


def test_every_patch_fits(checkout):
    verdicts = patches.verdicts(megatrons.find(checkout))
    assert verdicts
    assert {verdict.status for verdict in verdicts} == {"same"}


@pytest.mark.parametrize(
    ("changes", "stage", "processes"),
    [
        pytest.param("", None, 1, id="one"),
        pytest.param(TP2, None, 2, id="tp2", marks=RARELY),
        pytest.param("", 0, 1, id="engine", marks=RARELY),
        pytest.param("", 1, 2, id="engine-dp2-zero-1"),
        pytest.param(TP2, 0, 2, id="engine-tp2", marks=RARELY),
    ],
)
def test_it_trains_like_megatron_lm(checkout, data, expected, changes, stage, processes):
    changes += "" if stage is None else f" {engine(data, stage)}"
    assert train(checkout, data, changes, processes=processes) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("script", [pytest.param(stock_lm.BERT, marks=RARELY), stock_lm.T5])
def test_bert_and_t5_train_like_those_of_megatron_lm(checkout, data, script):
    stock_lm.write_sentences(data)
    of_lm = find_or_skip("megatron_lm", megatrons.LEGACY_VERSION)
    expected = train_sentences(of_lm, data, script, "--train-iters 4")
    found = train_sentences(checkout, data, script, f"--train-iters 4 {TP2}", processes=2)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "place"),
    [(None, f"iter_{SAVED:07d}"), (1, f"global_step{SAVED}")],
    ids=["upstream's", "engine's"],
)
def test_it_goes_on_from_its_checkpoint(checkout, data, expected, stage, place, tmp_path):
    """Not from one that is damaged, or holds what would run."""
    changes = "" if stage is None else engine(data, stage)
    train(checkout, data, changes, f"--save {tmp_path} --save-interval {SAVED} --exit-interval {SAVED}")
    tracker = "latest_checkpointed_iteration.txt" if stage is None else "latest"
    assert (tmp_path / tracker).read_text() == (str(SAVED) if stage is None else place)
    assert not [*tmp_path.glob("*.partial")]
    found = train(checkout, data, changes, f"--load {tmp_path}")
    assert found == pytest.approx({i: expected[i] for i in range(SAVED + 1, ITERATIONS + 1)}, rel=1e-5)

    script, *flags = steps(checkout, data, changes, f"--load {tmp_path}")
    file = max((tmp_path / place).rglob("*.pt"), key=lambda path: path.stat().st_size)
    torch.save({"args": Runs(tmp_path / "mark")}, file)
    if stage is not None:  # both trackers lead to the same comparison
        damaged = stock_lm.run(Path(script), flags)
        assert damaged.returncode == 2, damaged.stderr
        assert f"is damaged: {file.relative_to(tmp_path / place)}" in damaged.stderr.splitlines()[-1]
    (tmp_path / place / checksums.NAME).unlink()
    refused = stock_lm.run(Path(script), flags)
    assert refused.returncode == 2, refused.stderr
    assert " refers to posix.mkdir" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "mark").exists()


def test_a_pipeline_clips_by_the_norm_of_all_stages(checkout, data, tmp_path):
    """DeepSpeed 0.19.8 without ZeRO counts some parameters twice, others never: losses differ by 3e-5."""
    changes = engine(tmp_path, 0)
    train(checkout, data, changes, f"--save {tmp_path}/saved --save-interval 1 --train-iters 1")
    changes += f" --load {tmp_path}/saved --finetune --no-load-optim --no-load-rng"
    whole = train(checkout, data, changes)
    split_into_stages(checkout, tmp_path / "saved", 2)
    rewritten = "--no-verify-checkpoint"  # by the line above
    parts = train(checkout, data, changes, rewritten, "--pipeline-model-parallel-size 2", processes=2)
    assert parts == pytest.approx(whole, rel=1e-6)
