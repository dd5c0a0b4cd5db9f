"""Run the workers of these tests on a megatron-core other than the installed one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, checkout
from tests.support import tiny, warm
from tests.support.simulated import run_simulated, unavailable

MAIN = "0.20.0"  # as Megatron-LM's main calls itself
MAIN_TREE = "core_main_d98e8a64"
OFTEN = ("0.16.1", "0.19.2")  # a warm parent that has imported one of these saves more than it takes


def root_of(version: str) -> Path:
    """Return the folder of a megatron-core in checkouts/ (a wheel, or main's tree), or skip the test."""
    root = ROOT / "checkouts" / (MAIN_TREE if version == MAIN else f"megatron_core-{version}")
    if not root.is_dir():
        pytest.skip(f"no {root.relative_to(ROOT)}: run scripts/get_megatron.sh")
    return root


def environment(version: str) -> dict[str, str]:
    """Return the environment variables that select a megatron-core in checkouts/, or skip the test."""
    root = checkout("megatron_core", version) if version == "0.16.1" else root_of(version)
    path = os.pathsep.join([str(root), tiny.environment()["PYTHONPATH"]])
    return {"PYTHONPATH": path, "MEGATRON_LM_PATH": str(root)}


def run(
    worker: str, version: str, *arguments: str, processes: int = 0, npu: bool = False, **variables: str
) -> None:
    """Run a module of this folder, in one process or in a process group, and check that it succeeds.

    Args:
        worker: the module to run.
        version: the version of megatron-core in checkouts/; the test is skipped if it is not there.
        arguments: the arguments of the module.
        processes: the number of processes that torchrun starts, or 0 to run without torchrun.
        npu: whether to use simulated NPUs; the test is skipped if they are not available.
        variables: additional environment variables, besides those that select the version.
    """
    common, found = tiny.environment(), environment(version) | variables
    launcher = tiny.torchrun(processes) if processes else []
    command = [*launcher, "-m", f"tests.adaptors.megatron_core.{worker}", *arguments]
    modules = warm.DRIVER if version in OFTEN or not variables else ()  # then test_versions.py's parent
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
