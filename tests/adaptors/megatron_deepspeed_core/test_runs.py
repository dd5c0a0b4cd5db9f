"""The ``pretrain_gpt.py`` of deepspeedai's Megatron-DeepSpeed, unedited: all layouts train alike."""

from __future__ import annotations

import pytest

from megatron_npu import patch_commands, upstream
from tests.adaptors.megatron_deepspeed.pretraining import TP2, call_in_tree, engine, train

pytest.importorskip("deepspeed")

WHOLE = "--no-pipeline-parallel"  # not a pipeline, which stages 2 and 3 are not for
ANEW = "--finetune --no-load-optim --no-load-rng"


def test_every_patch_fits(checkout):
    verdicts = patch_commands.verdicts(upstream.find(checkout))
    assert verdicts
    assert {verdict.status for verdict in verdicts} == {"same"}


@pytest.mark.parametrize(("stage", "flags"), [(1, ""), (2, WHOLE), (3, WHOLE)], ids=["pipeline-1", "2", "3"])
def test_zero_trains_like_one_process(checkout, data, expected, stage, flags, tmp_path):
    found = train(checkout, data, engine(tmp_path, stage), flags, processes=2)
    assert found == pytest.approx(expected, rel=1e-5)


def test_tensor_parallel_ranks_train_like_one_process(checkout, data, expected, tmp_path):
    """From the same weights: those after one step, whose learning rate is 0."""
    train(checkout, data, f"--save {tmp_path}/whole --save-interval 1 --train-iters 1")
    call_in_tree(
        checkout, "../megatron_deepspeed_core/tensor_ranks.py", tmp_path / "whole", 2, tmp_path / "cut"
    )
    found = train(checkout, data, f"--load {tmp_path}/cut {ANEW} {TP2}", processes=2)
    assert found == pytest.approx(expected, rel=1e-5)
