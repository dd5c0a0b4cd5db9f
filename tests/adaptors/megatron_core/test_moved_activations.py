"""--fine-grained-activation-offloading before 0.16, where it is ours, on a simulated NPU."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.conftest import ROOT
from tests.support import bytecode
from tests.support.simulated import run_simulated, unavailable


def test_losses_are_the_same_and_the_peak_is_lower():
    root = ROOT / "checkouts" / "megatron_core-0.12.1"
    if not root.is_dir():
        pytest.skip(f"no {root.relative_to(ROOT)}: run scripts/get_megatron.sh")
    if unavailable():
        pytest.skip(unavailable())
    done = run_simulated(
        *[sys.executable, "-m", "tests.adaptors.megatron_core.moved_activations_worker"],
        cwd=ROOT,
        PYTHONPATH=f"{root}{os.pathsep}{ROOT}",
        MEGATRON_LM_PATH=str(root),
        **bytecode.elsewhere(),
    )
    assert done.returncode == 0, done.stdout[-3000:]
    plain, attention, every = json.loads(done.stdout.strip().splitlines()[-1])
    assert plain["losses"] == attention["losses"] == every["losses"]
    assert plain["moved"] == 0 < attention["moved"] < every["moved"]
    assert every["peak"] < attention["peak"] < plain["peak"]
