"""Muon of megatron-core 0.17 and newer without Triton, which its package imports always."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.adaptors.megatron_core.test_versions import environment_of, wheel
from tests.conftest import ROOT

WORKER = Path(__file__).with_name("muon_worker.py")
UNPACKED = ROOT / "checkouts" / "emerging_optimizers-0.3.0"
# Beside and not into the environment: the package says that it is for Python 3.12.
COMMAND = (
    f"pip install --no-deps --ignore-requires-python --target {UNPACKED.relative_to(ROOT)} "
    "emerging_optimizers==0.3.0"
)


def folder() -> Path:
    """Return the folder that holds the package; the test is skipped where there is none."""
    found = importlib.util.find_spec("emerging_optimizers")
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    if not UNPACKED.is_dir():
        pytest.skip(f"emerging_optimizers is not installed: {COMMAND}")
    return UNPACKED


@pytest.mark.parametrize("version", ["0.17.1", "0.19.2"])
def test_muon_trains_and_its_first_update_is_that_of_fp64(version, tmp_path) -> None:
    environment = environment_of(wheel(version))
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(folder())])
    command = [sys.executable, str(WORKER), str(tmp_path / "store")]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] < 1e-4
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < found["losses"][0] / 2
