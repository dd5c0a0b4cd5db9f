"""After ``megatron_npu.uninstall()`` nothing that the plug-in has changed in the process remains."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import LONGEST, ROOT

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the machine has one core")


@needs_two  # else no rank is bound to a core of its own
@pytest.mark.parametrize(
    ("tree", "modules"),
    [("core_v0.16.1", ["megatron.training"]), ("285068c8", ["megatron.training"])],
)
def test_nothing_remains(tree: str, modules: list[str]) -> None:
    path = ROOT / "checkouts" / tree
    if not path.is_dir():
        pytest.skip(f"no checkouts/{tree}")
    ours = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "MEGATRON_NPU_DEVICE": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(path), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.uninstalled", *modules]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing remains"
