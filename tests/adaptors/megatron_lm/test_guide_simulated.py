"""Every command of the guide on a simulated Ascend NPU, word for word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import warm
from tests.adaptors.megatron_lm import guide
from tests.conftest import LONGEST
from tests.sim.conftest import run_simulated, unavailable


@pytest.fixture(scope="module")
def commands(checkout, tmp_path_factory) -> guide.Guide:
    if unavailable():
        pytest.skip(unavailable())

    def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        one = {"MEGATRON_NPU_DEVICE": "npu", "NPUS_PER_NODE": "1"}  # of the eight that there seem to be
        [program], _ = warm.simulated([sys.executable], os.environ)
        own = {"PYTHON": program, "PYTHON_EXEC": program, "PRESET": "small", **one}
        done = run_simulated(*command, timeout=LONGEST, **own, **changes)
        assert " x npu" in done.stdout, done.stdout[-3000:]
        done.stderr = ""  # both outputs are one text
        return done

    return guide.Guide(checkout, tmp_path_factory.mktemp("guide"), run, guide.SIZES)


@pytest.mark.parametrize(("pretrain", "test"), guide.PAIRS, ids=guide.PRETRAIN)
def test_trains_and_evaluates(commands, pretrain, test):
    guide.check(commands, pretrain, test)


@pytest.mark.parametrize("window", ["65536", "2048"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_layouts_agree(commands, precision, window):
    """SBH and BSH give the same losses to the last digit."""
    sbh, bsh = guide.losses_of(commands, precision, window)
    assert sbh == bsh
