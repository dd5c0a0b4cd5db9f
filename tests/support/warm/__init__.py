"""Start the interpreters of tests as forks of a parent that has already imported torch, and Megatron.

Importing torch takes one and a half seconds of a core, Megatron's training five, and the suite starts many
hundred processes. ``ready(command, env)`` makes a command line and an environment for a process, and those
that it starts with ``torchrun`` or ``multiprocessing``, that is forked by such a parent (``server.py``). It
behaves as ``python`` does, but for the imports that are there already.

It is not for tests of what happens at a start or an import: they use ``sys.executable``. On simulated NPUs
(``simulated``) only torch is imported before, or, where modules are named, torch_npu and they. All processes
of a run of the suite share the parents (``parents.py``). ``TEST_COLD=1`` lets every process of the suite
start from nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import bytecode, processes
from tests.support.warm import parents

ROOT = Path(__file__).resolve().parents[3]
TORCH = ("numpy", "torch", "torch.distributed.launcher.api", "torch.distributed.checkpoint")
_OPTIMIZERS = "torch._dynamo"  # half of a second; Megatron and torch's first optimizer import it
DRIVER = (
    "megatron_npu.commands.cli",
    "megatron_npu.pretrain.run.pretrain",
    "megatron_npu.generation.generate",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_layer_specs",
)
# The second half, where a tree has them, is what its GPT scripts import.
STOCK = (
    "megatron.training",
    "megatron.core.datasets.blended_megatron_dataset_builder?",
    "megatron.core.datasets.gpt_dataset?",
    "megatron.core.models.gpt.gpt_layer_specs?",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs?",
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs?",
    "megatron.core.tokenizers.text.text_tokenizer?",  # since 0.17 with transformers
    "megatron.core.tokenizers.text.utils.build_tokenizer?",
    "megatron.core.tokenizers.utils.build_tokenizer?",
)
NPU = ("torch_npu",)  # for what runs on simulated NPUs without Megatron, or imports its own
# In the environment of a fork: what it starts with sys.executable is forked as well.
WARM_CHILDREN = {"TEST_WARM_CHILDREN": "1"}
# What the imports of Megatron read and a parent may therefore be kept for.
_READ_BY_MEGATRON = ("PYTHONPATH", "MEGATRON_LM_PATH", "MEGATRON_NPU_TE", "MEGATRON_NPU_BACKPORT")
_READ = (*_READ_BY_MEGATRON, "MEGATRON_NPU_DEVICE", "LD_PRELOAD")
# And what torch_npu asks the simulator when it is loaded. The others are told it in each fork.
_READ_ON_NPU = (*_READ, "MEGATRON_NPU_SIM_DEVICES")
_READ_AT_START = ("LD_PRELOAD", "MEGATRON_NPU_AUTOLOAD")  # of a process, or where it imports torch
_OF_THE_FORK = ("MEGATRON_NPU_SIM_REPORT", "MEGATRON_NPU_SIM_HCCL_TIMEOUT")
_READ_LATER = ("MEGATRON_NPU_WATCHDOG", "MEGATRON_NPU_RENDEZVOUS_TIMEOUT")  # by a run
_OF_NPUS = ("ACL", "ASCEND", "CUDA", "HCCL", "MEGATRON_", "NPU", "PYTORCH_", "TASK_", "TORCH_")

home, numbers = parents.home, parents.numbers


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
        command: a command that starts with ``sys.executable``; any other command is returned unchanged.
        env: of the process. Where it sets up the plug-in in an uncommon way, ``modules`` are not imported
            before; where the plug-in must not be there, nothing is.
        modules: ``DRIVER``, ``STOCK`` or others.
        tree: what the imports take Megatron from, if neither the path nor MEGATRON_LM_PATH says it.
    """
    if command[0] != sys.executable or _must_be_cold(env):
        return list(command), dict(env)
    uncommon = [name for name in env if name.startswith("MEGATRON_") and name not in (*_READ, *_READ_LATER)]
    common = not uncommon and modules and env.get("MEGATRON_NPU_DEVICE") == "cpu"
    read = {name: env[name] for name in _READ if env.get(name)} if common else {}
    if common and tree is not None:
        read["MEGATRON_LM_PATH"] = str(tree)
    program = _program(modules if common else (), read)
    # torchrun starts its ranks with PYTHON_EXEC
    return [program, *command[1:]], {**env, "PYTHON_EXEC": program}


def plain(
    command: Sequence[str], env: Mapping[str, str], modules: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """Do what ``ready`` does where the plug-in must not be: no parent of these has it.

    Args:
        command: a command that starts with ``sys.executable``.
        env: the environment of the process.
        modules: imported before; Megatron's would be those of one tree.
    """
    off = {"MEGATRON_NPU_AUTOLOAD": "0"}
    if _must_be_cold({}):
        return list(command), {**env, **off}
    program = _program(modules, off)
    return [program, *command[1:]], {**env, **off, "PYTHON_EXEC": program}


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
            ``env`` sets up the plug-in or torch_npu in an uncommon way; none are ``NPU``, unless ``env`` sets
            up the simulator.
        tree: see ``ready``.
    """
    if command[0] not in (sys.executable, "python") or _must_be_cold(env):
        return list(command), dict(env)
    changed = {name for name, value in env.items() if os.environ.get(name) != value}
    later = {*_READ_ON_NPU, *_READ_LATER, *_OF_THE_FORK}
    uncommon = [name for name in changed - later if name.startswith(_OF_NPUS)]
    read = {name: env[name] for name in _READ_ON_NPU if env.get(name)}
    if read.get("MEGATRON_NPU_DEVICE") == "npu":  # which is chosen there anyway
        del read["MEGATRON_NPU_DEVICE"]
    if tree is not None:
        read["MEGATRON_LM_PATH"] = str(tree)
    if modules in ((), NPU):
        read = {name: value for name, value in read.items() if name not in _READ_BY_MEGATRON}
    if not modules and not read:
        modules = NPU  # the parent of the marked tests, which is there already
    if not modules or uncommon:
        modules, read = (), {}
    program = _program(modules, read, on_npu=True)
    return [program, *command[1:]], {**env, "PYTHON_EXEC": program}


def _must_be_cold(env: Mapping[str, str]) -> bool:
    return "TEST_COLD" in os.environ or sys.platform != "linux" or env.get("MEGATRON_NPU_AUTOLOAD") == "0"


def for_scripts(
    env: Mapping[str, str], modules: tuple[str, ...] = (), tree: Path | None = None
) -> dict[str, str]:
    """Return ``env`` for shell scripts that start ``$PYTHON``, with imports done before as by ``ready``."""
    [program], env = ready([sys.executable], env, modules, tree)
    return {**env, "PYTHON": program}


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Make processes that multiprocessing spawns from this one forks of a parent that has imported torch."""
    before = multiprocessing.spawn.get_executable()
    [program], _ = ready([sys.executable], os.environ)
    multiprocessing.set_executable(program)
    yield
    multiprocessing.set_executable(before)


def _program(modules: tuple[str, ...], read: dict[str, str], *, on_npu: bool = False) -> str:
    late = on_npu and not modules  # each fork loads torch_npu
    backends = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if late else {}
    first = TORCH if late else (*TORCH, _OPTIMIZERS)
    launcher = [sys.executable, "-m", "megatron_npu", "sim", "--"] if on_npu else []
    # torch is two of the three to five seconds that a parent takes; torch_npu runs slower in forks of forks
    from_start = on_npu or not modules or not read.keys().isdisjoint(_READ_AT_START)
    base = "" if from_start else _program((), {})
    return parents.program([*first, *modules], read, _environment(read) | backends, launcher, base)


def _environment(read: dict[str, str]) -> dict[str, str]:
    """Return the environment of a parent: this one, without what concerns the plug-in, and ``read``."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_")}
    search = [read.get("MEGATRON_LM_PATH"), read.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, search))
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**others, **bytecode.elsewhere(), **threads, **read, "PYTHONPATH": path}
