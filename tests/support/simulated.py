"""Run commands on simulated NPUs, as ``megatron-npu sim -- command`` does."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.sim import launcher, site
from tests.support import processes, warm

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess]


def inside() -> bool:
    """Return whether this process has simulated NPUs."""
    return settings.SIM.enabled()


def run_simulated(
    *command: str,
    timeout: float = 300,
    cwd: Path | None = None,
    modules: tuple[str, ...] = (),
    tree: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess:
    """Run ``megatron-npu sim -- command`` and return what it did; both outputs as one text in ``stdout``.

    Args:
        command: a program and its arguments.
        timeout: seconds.
        cwd: where it runs.
        modules: what is imported before, see ``warm.simulated``.
        tree: where they are imported from, see ``warm.ready``.
        environment: changes to that of this process.
    """
    # The CPU-only settings of the surrounding run must not follow into a process that has NPUs.
    inherited = {name: value for name, value in os.environ.items() if name != settings.DEVICE.name}
    own = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(), **environment}
    words, env = warm.simulated(command, own, modules, tree)
    real = [sys.executable, "-m", "megatron_npu", "sim", "--", *words]
    try:  # the parent of a fork was started by that command, which has nothing left to prepare
        words, env = (real, env) if words[0] == command[0] else (words, _prepared(env))
    except UsageError:  # is what the command says
        words = real
    return processes.run(
        words,
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def _prepared(environment: dict[str, str]) -> dict[str, str]:
    """Return what ``megatron-npu sim`` makes of an environment, without a process for it."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        return launcher.prepare()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@functools.cache
def unavailable() -> str | None:
    """Return why the simulator cannot be prepared here through no fault of its own; None if it can."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        return "no C++ compiler: the simulated Ascend cannot be built"
    try:
        site.prepare()
    except UsageError as error:
        return f"the simulated Ascend cannot be prepared: {error}"
    return None


@pytest.fixture(scope="session")
def simulated() -> Run:
    """Return ``run_simulated``, or skip."""
    if unavailable():
        pytest.skip(unavailable())
    return run_simulated
