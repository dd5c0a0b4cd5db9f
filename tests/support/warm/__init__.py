"""Interpreters for what tests start: forked from a parent that has imported torch, and Megatron, already.

Importing torch takes one and a half seconds of a core, Megatron's training five, and the suite starts many
hundred processes. ``ready(command, env)`` makes a command line and an environment for a process, and those
that it starts with ``torchrun`` or ``multiprocessing``, that is forked by such a parent (``server.py``). It
behaves as ``python`` does, but for the imports that are there already.

It is not for tests of what happens at a start or an import: they use ``sys.executable``. On simulated NPUs
(``simulated``) only torch is imported before, or, where modules are named, torch_npu and they.
``TEST_COLD=1`` lets every process of the suite start from nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import bytecode, processes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TORCH = ("numpy", "torch", "torch.distributed.launcher.api", "torch.distributed.checkpoint")
_OPTIMIZERS = "torch._dynamo"  # half of a second; Megatron and torch's first optimizer import it
DRIVER = (
    "megatron_npu.pretrain.run.pretrain",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt.gpt_layer_specs",
)
STOCK = ("megatron.training",)
NPU = ("torch_npu",)  # for what runs on simulated NPUs without Megatron, or imports its own
MOST = 6  # parents alive in this process; each holds up to 400 MB
# What the imports of Megatron read and a parent may therefore be kept for.
_READ = ("PYTHONPATH", "MEGATRON_LM_PATH", "MEGATRON_NPU_DEVICE", "LD_PRELOAD")
# And what the simulator reads when it is loaded. Its report is asked for in each fork.
_READ_ON_NPU = (*_READ, "MEGATRON_NPU_SIM_DEVICES", "MEGATRON_NPU_SIM_HCCL_TIMEOUT")
_REPORT = "MEGATRON_NPU_SIM_REPORT"
_OF_NPUS = ("ACL", "ASCEND", "CUDA", "HCCL", "MEGATRON_", "NPU", "PYTORCH_", "TASK_", "TORCH_")

_parents: dict[tuple[object, ...], _Parent] = {}


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    modules: tuple[str, ...] = (),
    tree: Path | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run ``command``, which starts with ``sys.executable``, as ``subprocess.run`` does; see ``ready``."""
    command, env = ready(command, env, modules, tree)
    return processes.run(command, env=env, **options)


def ready(
    command: Sequence[str],
    env: Mapping[str, str],
    modules: tuple[str, ...] = (),
    tree: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return ``command`` and ``env`` with an interpreter that has imported ``TORCH`` and ``modules``.

    Args:
        command: starts with ``sys.executable``; anything else is returned as it is.
        env: of the process. Where it sets up the plug-in in an uncommon way, ``modules`` are not imported
            before; where the plug-in must not be there, nothing is.
        modules: ``DRIVER``, ``STOCK`` or others.
        tree: what the imports take Megatron from, if neither the path nor MEGATRON_LM_PATH says it.
    """
    if command[0] != sys.executable or _must_be_cold(env):
        return list(command), dict(env)
    uncommon = [name for name in env if name.startswith("MEGATRON_") and name not in _READ]
    common = not uncommon and modules and env.get("MEGATRON_NPU_DEVICE") == "cpu"
    read = {name: env[name] for name in _READ if env.get(name)} if common else {}
    if common and tree is not None:
        read["MEGATRON_LM_PATH"] = str(tree)
    program = _parent(modules if common else (), read).program
    # torchrun starts its ranks with PYTHON_EXEC
    return [program, *command[1:]], {**env, "PYTHON_EXEC": program}


def simulated(
    command: Sequence[str],
    env: Mapping[str, str],
    modules: tuple[str, ...] = (),
    tree: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return what stands behind ``megatron-npu sim --``, and its environment, with torch imported before.

    Args:
        command: starts with ``sys.executable`` or ``python``; anything else is returned as it is.
        env: of the process; the settings of the simulator in it count.
        modules: ``DRIVER``, ``STOCK``, ``NPU`` or others, imported before as well, with torch_npu, unless
            ``env`` sets up the plug-in or torch_npu in an uncommon way.
        tree: see ``ready``.
    """
    if command[0] not in (sys.executable, "python") or _must_be_cold(env):
        return list(command), dict(env)
    changed = {name for name, value in env.items() if os.environ.get(name) != value}
    uncommon = [name for name in changed - {*_READ_ON_NPU, _REPORT} if name.startswith(_OF_NPUS)]
    common = modules and not uncommon
    read = {name: env[name] for name in _READ_ON_NPU if env.get(name)} if common else {}
    if common and tree is not None:
        read["MEGATRON_LM_PATH"] = str(tree)
    program = _parent(modules if common else (), read, on_npu=True).program
    return [program, *command[1:]], {**env, "PYTHON_EXEC": program}


def numbers() -> list[int]:
    """Return the process numbers of the parents that are alive: the parents of all forks."""
    return [parent.number for parent in _parents.values()]


def _must_be_cold(env: Mapping[str, str]) -> bool:
    return "TEST_COLD" in os.environ or sys.platform != "linux" or env.get("MEGATRON_NPU_AUTOLOAD") == "0"


def for_scripts(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` for shell scripts that start ``$PYTHON``, with torch imported before as by ``ready``."""
    [program], env = ready([sys.executable], env)
    return {**env, "PYTHON": program}


def _parent(modules: tuple[str, ...], read: dict[str, str], *, on_npu: bool = False) -> _Parent:
    key = (on_npu, modules, *sorted(read.items()))
    if key not in _parents:
        if len(_parents) >= MOST:
            _parents.pop(next(iter(_parents))).end()
        _parents[key] = _Parent(modules, read, on_npu)
    _parents[key] = _parents.pop(key)  # the last used is the last to go
    return _parents[key]


class _Parent:
    """A running ``server.py``; ``program`` takes the arguments of ``python``."""

    def __init__(self, modules: tuple[str, ...], read: dict[str, str], on_npu: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self._folder.name)
        address, program, log = folder / "socket", folder / "python", folder / "log"
        launcher = [sys.executable, "-m", "megatron_npu", "sim", "--"] if on_npu else []
        late = on_npu and not modules  # each fork loads torch_npu
        backends = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if late else {}
        first = TORCH if late else (*TORCH, _OPTIMIZERS)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*launcher, sys.executable, str(HERE / "server.py"), str(address), *first, *modules],
                env=_environment(read) | backends,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                preexec_fn=_die_with_parent,
                start_new_session=True,  # Ctrl-C is for its clients
                text=True,
            )
        atexit.register(self.end)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"no warm parent with {', '.join((*TORCH, *modules))}:\n{log.read_text()}")
        # a kernel takes one argument behind #!, so a shell gives them
        client = [sys.executable, "-I", "-S", str(HERE / "client.py"), str(address), str(program)]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        program.chmod(0o700)
        self.program = str(program)
        self.number = self._process.pid

    def end(self) -> None:
        """Kill the parent; what it has forked for clients that are alive goes on."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _environment(read: dict[str, str]) -> dict[str, str]:
    """Return the environment of a parent: this one, without what concerns the plug-in, and ``read``."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_")}
    search = [read.get("MEGATRON_LM_PATH"), read.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, search))
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**others, **bytecode.elsewhere(), **threads, **read, "PYTHONPATH": path}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed pytest leaves none behind
