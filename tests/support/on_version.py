"""Workers of these tests on a megatron-core that is not the installed one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, checkout
from tests.sim.conftest import run_simulated, unavailable
from tests.support import tiny, warm

MAIN = "0.20.0"  # as Megatron-LM's main calls itself
MAIN_TREE = "core_main_d98e8a64"
OFTEN = ("0.16.1", "0.19.2")  # a warm parent that has imported one of these saves more than it takes


def root_of(version: str) -> Path:
    """Return the folder of a megatron-core in checkouts/: its wheel, or main's tree; skip without."""
    root = ROOT / "checkouts" / (MAIN_TREE if version == MAIN else f"megatron_core-{version}")
    if not root.is_dir():
        pytest.skip(f"no {root.relative_to(ROOT)}: run scripts/get_megatron.sh")
    return root


def environment(version: str) -> dict[str, str]:
    """Return the variables that find a megatron-core in checkouts/; skip the test where it is absent."""
    root = checkout("megatron_core", version) if version == "0.16.1" else root_of(version)
    path = os.pathsep.join([str(root), tiny.environment()["PYTHONPATH"]])
    return {"PYTHONPATH": path, "MEGATRON_LM_PATH": str(root)}


def run(
    worker: str, version: str, *arguments: str, processes: int = 0, npu: bool = False, **variables: str
) -> None:
    """Run a module of this folder, by itself or in the processes of a group, and demand that it succeeds.

    Args:
        worker: the module.
        version: of megatron-core; it is taken from checkouts/, and the test skipped where it is absent.
        arguments: of the module.
        processes: torchrun's; 0: none.
        npu: on simulated ones; the test is skipped where there can be none.
        variables: of the environment, besides those that find the version.
    """
    common, found = tiny.environment(), environment(version) | variables
    launcher = tiny.torchrun(processes) if processes else []
    command = [*launcher, "-m", f"tests.adaptors.megatron_core.{worker}", *arguments]
    modules = warm.DRIVER if version in OFTEN else ()
    if npu:
        if unavailable():
            pytest.skip(unavailable())
        done = run_simulated("python", *command, cwd=ROOT, **found)
        assert done.returncode == 0, done.stdout[-3000:]
        return
    done = warm.run(
        [sys.executable, *command],
        env=common | found,
        modules=modules,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
