"""The ``pretrain_gpt.py`` of bigscience's Megatron-DeepSpeed, unedited: it trains like Megatron-LM."""

from __future__ import annotations

import pytest

from megatron_npu import patch_commands, upstream
from tests.adaptors.megatron_deepspeed.pretraining import ITERATIONS, TP2, engine, train

pytest.importorskip("deepspeed")

SAVED = 4


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
