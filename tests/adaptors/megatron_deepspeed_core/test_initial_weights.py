"""With ZeRO 3 the weights of a model are those that the host draws without it."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core import random
from tests.support import bytecode, stock_lm, tiny
from tests.support.deepspeed_pretraining import RARELY, engine, steps
from tests.support.simulated import run_simulated, unavailable


@pytest.mark.parametrize("draw", [torch.nn.init.normal_, torch.nn.init.uniform_])
def test_they_are_drawn_in_fp32(draw):
    torch.manual_seed(1)
    expected = draw(torch.empty(8, 8))
    torch.manual_seed(1)
    with random.HostDraws():
        found = draw(torch.empty(8, 8, dtype=torch.float64))  # torch draws other numbers for these
    assert torch.equal(found, expected.double())


@RARELY
def test_zero_3_begins_on_an_npu_as_on_the_cpu(checkout, data, expected, tmp_path):
    pytest.importorskip("deepspeed")
    if unavailable():
        pytest.skip(unavailable())
    flags = f"{engine(tmp_path, 3)} --no-pipeline-parallel --train-iters 2"
    result = run_simulated(*tiny.command("run", *steps(checkout, data, flags)), **bytecode.elsewhere())
    assert result.returncode == 0, result.stdout[-5000:]
    found = stock_lm.losses(result.stdout)
    assert found == pytest.approx({i: expected[i] for i in found}, rel=1e-5)
