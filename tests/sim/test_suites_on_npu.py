"""The tests of operations and adaptors that run on every device, again on the simulated NPU."""

from __future__ import annotations

import re
import sys

import pytest

CORE = "tests/hosts/megatron_core"
# files, what selects their tests of the npu, and how many there are at least
SUITES = {
    "operations": (["tests/ops"], ["-k", "npu"], 400),
    "adaptors of megatron-core": (
        [
            f"{CORE}/{name}.py"
            for name in (
                "test_adaptors",
                "test_attention_adaptor",
                "test_autocast",
                "test_experts",
                "test_inference_mode",
                "test_training_features",
            )
        ],
        [],
        105,
    ),
    "what torch's names for CUDA mean": (
        [f"tests/unit/devices/test_{name}.py" for name in ("autocast", "loaders", "namespace", "placement")],
        [],
        130,
    ),
}


@pytest.mark.parametrize("suite", SUITES)
def test_suite(simulated, suite):
    files, selection, least = SUITES[suite]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = simulated(*command, *files, *selection, timeout=540)
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= least
