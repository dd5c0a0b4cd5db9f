"""The ``pretrain_gpt.py`` of deepspeedai's Megatron-DeepSpeed, unedited: all layouts train alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.commands import patches
from megatron_npu.upstream import megatrons
from tests.conftest import checkout as find_or_skip
from tests.support import stock_lm
from tests.support.deepspeed_pretraining import (
    RARELY,
    TP2,
    call_in_tree,
    engine,
    to_universal,
    train,
    train_sentences,
)

pytest.importorskip("deepspeed")

WHOLE = "--no-pipeline-parallel"  # not a pipeline, which stages 2 and 3 are not for
ROTARY = "--use-rotary-position-embeddings --no-position-embedding"
ANEW = "--finetune --no-load-optim --no-load-rng"


def test_every_patch_fits(checkout):
    verdicts = patches.verdicts(megatrons.find(checkout))
    assert verdicts
    assert {verdict.status for verdict in verdicts} == {"same"}


@pytest.mark.parametrize(
    ("stage", "flags"),
    [(1, ""), pytest.param(2, WHOLE, marks=RARELY), (3, WHOLE)],
    ids=["pipeline-1", "2", "3"],
)
def test_zero_trains_like_one_process(checkout, data, expected, stage, flags, tmp_path):
    found = train(checkout, data, engine(tmp_path, stage), flags, processes=2)
    assert found == pytest.approx(expected, rel=1e-5)


@RARELY
def test_weight_decay_reaches_weights_that_are_in_parts(checkout, data, tmp_path, monkeypatch):
    """Upstream's own losses differ by 5e-4 after six iterations."""
    monkeypatch.setenv("MEGATRON_NPU_BACKPORT", "1")
    decay = "--weight-decay 10"
    found = train(checkout, data, engine(tmp_path, 3), f"{WHOLE} {decay}", processes=2)
    assert found == pytest.approx(train(checkout, data, decay), rel=1e-5)


@pytest.mark.parametrize(
    "rotary", [pytest.param(False, id="learned"), pytest.param(True, id="rotary", marks=RARELY)]
)
def test_ranks_of_a_sequence_train_like_one_process(checkout, data, expected, rotary, tmp_path, monkeypatch):
    """Each has half of the tokens, and half of the heads in attention; positions are those of the whole."""
    monkeypatch.setenv("MEGATRON_NPU_BACKPORT", str(int(rotary)))
    flags = ROTARY if rotary else ""
    if rotary:
        expected = train(checkout, data, flags)
    parts = f"{WHOLE} --ds-sequence-parallel-size 2"
    found = train(checkout, data, engine(tmp_path, 1), parts, flags, processes=2)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("script", [pytest.param(stock_lm.BERT, marks=RARELY), stock_lm.T5])
def test_bert_and_t5_train_like_those_of_megatron_lm(checkout, data, script, tmp_path):
    """One process and two tensor-parallel ranks, from the same weights: those after a step with rate 0."""
    stock_lm.write_sentences(data)
    saved = f"--train-iters 4 --save {tmp_path}/saved --save-interval 1"
    found = train_sentences(checkout, data, script, saved)
    to_megatron_lm(checkout, tmp_path)
    of_lm = find_or_skip("megatron_lm", megatrons.LEGACY_VERSION)
    changes = f"--train-iters 4 --load {tmp_path}/other {ANEW}"
    assert train_sentences(of_lm, data, script, changes) == pytest.approx(found, rel=1e-5)

    cut(checkout, tmp_path)
    changes = f"--train-iters 4 --load {tmp_path}/cut {ANEW} {TP2}"
    assert train_sentences(checkout, data, script, changes, processes=2) == pytest.approx(found, rel=1e-5)


@RARELY
@pytest.mark.parametrize("script", [stock_lm.BERT, stock_lm.T5])
def test_bert_and_t5_train_in_parts_like_one_process(checkout, data, script, tmp_path):
    """Stage 3 of ZeRO steps with each of their two groups by itself."""
    stock_lm.write_sentences(data)
    expected = train_sentences(checkout, data, script, "--train-iters 4")
    parts = f"{engine(tmp_path, 3)} {WHOLE} --train-iters 4"
    assert train_sentences(checkout, data, script, parts, processes=2) == pytest.approx(expected, rel=1e-5)


def test_a_universal_checkpoint_goes_on_with_another_layout(checkout, data, tmp_path):
    """Of ranks whose rows of the fused projection are queries, keys and values, as in one process."""
    # an even number of tokens: rows of padding would begin anew
    vocabulary, merges = stock_lm.write_vocabulary(tmp_path, merges=["a b"])
    flags = f"{engine(tmp_path, 1)} --vocab-file {vocabulary} --merge-file {merges}"
    saved = f"--save {tmp_path} --save-interval 3"
    expected = train(checkout, data, flags, saved, f"{TP2} --make-vocab-size-divisible-by 1", processes=2)
    to_universal(checkout, tmp_path / "global_step3")
    next((tmp_path / "global_step6").glob("*.pt")).write_bytes(b"")  # is not what is loaded
    flags += " --make-vocab-size-divisible-by 2"
    found = train(checkout, data, flags, f"--load {tmp_path} --universal-checkpoint")
    assert found == pytest.approx({i: expected[i] for i in range(4, 7)}, rel=1e-5)


@RARELY
def test_a_pipeline_turns_by_positions(checkout, data, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_BACKPORT", "1")
    assert train(checkout, data, engine(tmp_path, 0), ROTARY) == train(checkout, data, ROTARY)


@RARELY
def test_bf16_without_the_engine(checkout, data, expected):
    assert train(checkout, data, "--bf16") == pytest.approx(expected, rel=1e-3)


def test_a_resumed_run_is_the_interrupted_one(checkout, data, tmp_path):
    flags = f"{engine(tmp_path, 1)} --attention-dropout 0.1 --hidden-dropout 0.1"
    flags += " --train-iters 4 --save-interval 2"
    train(checkout, data, flags, f"--save {tmp_path}/whole")
    train(checkout, data, flags, f"--load {tmp_path}/whole --load-tag global_step2 --save {tmp_path}/rest")
    ends = (tmp_path / name / "global_step4" for name in ("whole", "rest"))
    call_in_tree(checkout, "same_tensors.py", *ends)


def test_the_same_weights_train_alike_in_ranks_and_in_megatron_lm(checkout, data, expected, tmp_path):
    """Those after one step, whose learning rate is 0: cut for two ranks, and in the order of 285068c8."""
    train(checkout, data, f"--save {tmp_path}/saved --save-interval 1 --train-iters 1")
    cut(checkout, tmp_path)
    found = train(checkout, data, f"--load {tmp_path}/cut {ANEW} {TP2}", processes=2)
    assert found == pytest.approx(expected, rel=1e-5)

    to_megatron_lm(checkout, tmp_path)
    of_lm = find_or_skip("megatron_lm", megatrons.LEGACY_VERSION)
    assert train(of_lm, data, f"--load {tmp_path}/other {ANEW}") == pytest.approx(expected, rel=1e-5)


def cut(checkout: Path, folder: Path) -> None:
    """Cut the checkpoint ``saved`` after one step for two tensor-parallel ranks: ``cut``."""
    script = "../megatron_deepspeed_core/tensor_ranks.py"
    call_in_tree(checkout, script, folder / "saved", 1, 2, folder / "cut")


def to_megatron_lm(checkout: Path, folder: Path) -> None:
    """Write the checkpoint ``saved`` after one step as one of Megatron-LM 285068c8: ``other``."""
    script = "../megatron_deepspeed_core/by_heads.py"
    call_in_tree(checkout, script, folder / "saved", 1, folder / "other")
