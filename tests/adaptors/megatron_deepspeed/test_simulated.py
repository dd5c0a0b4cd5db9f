"""The tree's ``pretrain_gpt.py`` on simulated Ascend NPUs over HCCL: the curve of Megatron-LM on the CPU."""

from __future__ import annotations

import pytest

from tests.support import bytecode, stock_lm, tiny, warm
from tests.support.deepspeed_pretraining import RARELY, TP2, engine, steps
from tests.support.simulated import run_simulated, unavailable

pytest.importorskip("deepspeed")


SCALED = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}}


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        pytest.param(f"{TP2} --fp16 --initial-loss-scale 4096", None, id="tp2-fp16", marks=RARELY),
        pytest.param("", 1, id="zero-1", marks=RARELY),
        pytest.param("--fp16", 0, id="zero-0-fp16"),
    ],
)
def test_trains_like_the_cpu(checkout, data, expected, changes, stage, tmp_path):
    if unavailable():
        pytest.skip(unavailable())
    half = "--fp16" in changes
    changes += "" if stage is None else f" {engine(tmp_path, stage, **(SCALED if half else {}))}"
    command = tiny.command("run", *steps(checkout, data, changes), processes=2)
    result = run_simulated(*command, modules=warm.STOCK, tree=checkout, **bytecode.elsewhere())
    assert result.returncode == 0, result.stdout[-5000:]
    assert "· simulated npu/hccl ·" in result.stdout
    assert "| simulated npu |" in result.stdout
    limit = 1e-4 if half else 1e-5
    assert stock_lm.losses(result.stdout) == pytest.approx(expected, rel=limit)
