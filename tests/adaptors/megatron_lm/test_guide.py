"""Every command of the guide on the CPU, word for word: it trains, and evaluates what it has trained."""

from __future__ import annotations

import subprocess

import pytest

from tests import warm
from tests.adaptors.megatron_lm import guide, runs
from tests.conftest import LONGEST


@pytest.fixture(scope="module")
def commands(checkout, tmp_path_factory) -> guide.Guide:
    def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=warm.for_scripts(runs.environment(**changes)),
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )

    return guide.Guide(checkout, tmp_path_factory.mktemp("guide"), run, guide.LONG)


@pytest.mark.parametrize(("pretrain", "test"), guide.PAIRS, ids=guide.PRETRAIN)
def test_trains_and_evaluates(commands, pretrain, test):
    guide.check(commands, pretrain, test)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_layouts_agree_and_windows_do_not(commands, precision):
    """SBH and BSH give the same losses to the last digit; a window gives others than causal attention."""
    causal, window = (guide.losses_of(commands, precision, window) for window in ("65536", "2048"))
    assert causal[0] == causal[1] != window[0] == window[1]
