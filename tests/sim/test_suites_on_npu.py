"""The tests of operations and adaptors that run on every device, again on the simulated NPU."""

from __future__ import annotations

import re
import sys

import pytest

from tests.conftest import LONGEST
from tests.support import warm

CORE = "tests/adaptors/megatron_core"
# these start processes of their own, and those for the simulator, too, where they are for it; the others are
# on the CPU (tiny.environment), as they are where the files themselves are run
STARTING_OTHERS = (
    *("other_versions", "stock_script", "every_mask_and_window", "over_hccl"),
    *("another_class", "since_0_17_our_provider"),
)
# files, what selects their tests of the npu, and how many there are at least
SUITES = {
    "operations": (
        ["tests/ops"],
        ["-k", "npu or (test_swapping.py and (autocast or makes_no_logits))"],
        650,
    ),
    "adaptors of megatron-core": (
        [
            f"{CORE}/{name}.py"
            for name in (
                "test_adaptors",
                "test_output_layer",
                "test_arguments",
                "test_attention_adaptor",
                "test_attention_flags",
                "test_attention_packed",
                "test_autocast",
                "test_checkpointing",
                "test_context_parallel",
                "test_diagnostics",
                "test_expert_routing",
                "test_experts",
                "test_inference_mode",
                "test_many_tensors",
                "test_sharding_options",
                "test_start",
                "test_te_fallback",
                "test_transformer_layer",
                "test_unsupported_options",
            )
        ],
        ["-k", f"not ({' or '.join(STARTING_OTHERS)})"],
        202,
    ),
    "what torch's names for CUDA mean": (
        [
            f"tests/unit/devices/test_{name}.py"
            for name in (
                "autocast",
                "compiled_names",
                "device_arguments",
                "loaders",
                "moves",
                "namespace",
                "overflow",
            )
        ],
        [],
        140,
    ),
}


@pytest.mark.parametrize("suite", SUITES)
def test_suite(simulated, suite):
    files, selection, least = SUITES[suite]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = simulated(*command, *files, *selection, timeout=LONGEST, modules=warm.NPU)
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= least
