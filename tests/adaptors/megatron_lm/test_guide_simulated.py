"""Our page about the guide from its first command to its last, on a simulated Ascend NPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.adaptors.megatron_lm import guide
from tests.conftest import LONGEST
from tests.support import walk, warm
from tests.support.simulated import run_simulated, unavailable


@pytest.fixture(scope="module")
def walking(checkout, tmp_path_factory) -> walk.Walk:
    pytest.importorskip("nltk", reason="sentences are split with nltk, which is not installed")
    pytest.importorskip("wikiextractor", reason="wikiextractor is not installed")
    if unavailable():
        pytest.skip(unavailable())

    def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        one = {"MEGATRON_NPU_DEVICE": "npu", "NPUS_PER_NODE": "1"}  # of the eight that there seem to be
        [program], _ = warm.simulated([sys.executable], os.environ)
        own = {"PYTHON": program, "PYTHON_EXEC": program, **one}
        done = run_simulated(*command, timeout=LONGEST, **own, **changes)
        done.stderr = ""  # both outputs are one text
        return done

    return guide.through(guide.PAGE_COMMANDS, checkout, tmp_path_factory.mktemp("guide"), run)


@pytest.mark.parametrize("number", range(len(guide.PAGE_COMMANDS)), ids=map(walk.bare, guide.PAGE_COMMANDS))
def test_command(walking, number):
    guide.check(walking, number, "npu (simulated)")


@pytest.mark.parametrize("window", ["65536", "2048"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_layouts_agree(walking, precision, window):
    """SBH and BSH give the same losses to the last digit."""
    sbh, bsh = guide.losses_of(walking, f"pretrain_gpt_distributed_{precision}.sh", window)
    assert sbh == bsh
