"""Implement ``megatron-npu sim -- COMMAND…``, which runs a command as if this machine had Ascend NPUs."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from megatron_npu.base import settings
from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.command_examples import EXAMPLES
from megatron_npu.base.errors import UsageError
from megatron_npu.sim import build, cache, site
from megatron_npu.sim.settings import simulator_values

BOOT = Path(__file__).resolve().parent / "boot"
_INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended

_DESCRIPTION = (
    "Run COMMAND with the real torch_npu on simulated NPUs: device memory is host memory, "
    "kernels are CPU kernels, and HCCL uses shared memory. Child processes see the NPUs as "
    "well.\nSee docs/explanation/simulator.md."
)

_FLAGS = {"--devices": (settings.SIM_DEVICES, "N"), "--soc": (settings.SIM_SOC, "NAME")}


def main(argv: list[str]) -> int:
    """Prepare the simulator, and then execute COMMAND in this process.

    Return only if interrupted before that.

    Raises:
        UsageError: the command is missing or does not exist, or the machine cannot be prepared.
    """
    parser = Parser("megatron-npu sim", description=_DESCRIPTION)
    for flag, (variable, metavar) in _FLAGS.items():
        text = (
            f"{variable.help[0].lower()}{variable.help[1:].removesuffix('.')} (default: {variable.default})"
        )
        parser.add_argument(flag, type=variable.read, metavar=metavar, help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError(
            "no command was given; pass it as -- COMMAND ARGUMENTS..., for example: megatron-npu sim -- "
            "python train.py"
        )
    for variable, given in ((settings.SIM_DEVICES, options.devices), (settings.SIM_SOC, options.soc)):
        if given is not None:
            os.environ[variable.name] = str(given)
    program = _find(command[0])
    try:
        environment = prepare()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one, while compilers end, is no traceback
        cache.say("interrupted; the next use starts this preparation again")
        return _INTERRUPTED
    sys.stdout.flush()
    # Python finds its virtual environment by argv[0]: the bare name would be looked up on PATH
    os.execve(program, [program, *command[1:]], environment)


def prepare() -> dict[str, str]:
    """Prepare everything that a simulated process needs, and return its environment.

    Raises:
        UsageError: see ``site.prepare`` and ``build.runtime``; or this machine has a real CANN.
    """
    simulator_values()  # refuse a bad number before minutes of preparation
    if build.present("libascendcl.so"):
        raise UsageError(
            "the simulator must run on a machine without Ascend software, but a real CANN is on the library "
            "path (libascendcl.so can be loaded). Use this machine's NPUs, or do not source CANN's "
            "set_env.sh in this shell."
        )
    wheel = site.prepare()
    environment = {**os.environ, settings.SIM.name: "1", settings.SIM_SITE.name: str(wheel)}
    entries = [str(BOOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    # else torch_npu compares its watchdog with the default of real HCCL, and warns for every group
    environment.setdefault("HCCL_EXEC_TIMEOUT", settings.SIM_HCCL_TIMEOUT.get())
    if settings.SIM_MEMCHECK.enabled():
        # torch's allocator would hand out a freed block again with its old, plausible content
        environment["PYTORCH_NO_NPU_MEMORY_CACHING"] = "1"
    search = [*sys.path]
    sys.path.append(str(wheel))
    try:
        build.prepare()
    finally:
        sys.path[:] = search  # torch_npu is for the simulated process: without a CANN, its import fails
    return environment


def _find(program: str) -> str:
    """Return the path of the file to execute.

    ``python`` and ``torchrun`` are those of this environment.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(program, path=search)
    if found is None and os.path.isfile(program):
        raise UsageError(
            f"the file {program} cannot be executed; the command must be a program",
            remedy=f"Run megatron-npu sim -- python {program}, or megatron-npu sim -- megatron-npu run "
            f"{program} for a script of Megatron.",
        )
    if found is None:
        ours = f"megatron-npu {program}" in EXAMPLES
        raise UsageError(
            f"the command {program} was not found; it must be a program on PATH or a path to one",
            remedy=f"Run megatron-npu sim -- megatron-npu {program}." if ours else "Check its name.",
        )
    return found
