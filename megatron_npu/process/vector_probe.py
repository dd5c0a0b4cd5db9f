"""Replace ``subprocess`` in torch inductor's module that probes the processor's vector instructions.

To find out which vector instructions work, torch (2.13 and earlier) starts ``python -c``, which searches the
working directory for modules first. That folder may belong to another user. While the guard is on, that
module uses this module in the place of ``subprocess``; all other names are subprocess's own.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

from megatron_npu.base.replaced import Replaced
from megatron_npu.process import python_child

MODULE = "torch._inductor.cpu_vec_isa"
_replaced = Replaced()


def __getattr__(name: str) -> Any:
    return getattr(subprocess, name)


def run(command: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command as ``subprocess.run`` does, but without importing from the working directory."""
    return subprocess.run(_elsewhere(command), **options)


def check_call(command: Any, **options: Any) -> int:
    """Run a command as ``subprocess.check_call`` does, but without importing from the working directory."""
    return subprocess.check_call(_elsewhere(command), **options)


def check_output(command: Any, **options: Any) -> Any:
    """Run a command as ``subprocess.check_output`` does, but without importing from the working directory."""
    return subprocess.check_output(_elsewhere(command), **options)


def _elsewhere(command: Any) -> Any:
    """Return the command of a Python program, changed so that modules in the working directory are
    ignored.
    """
    if isinstance(command, list) and command[:2] == [sys.executable, "-c"]:
        return [*python_child.code(command[2]), *command[3:]]
    return command


def guard(module: ModuleType) -> None:
    """Make a torch inductor module use the functions in this module in place of ``subprocess``.

    A second call has no effect.
    """
    _replaced.set_once(module, "subprocess", importlib.import_module(__name__))


def release() -> None:
    """Restore the original ``subprocess`` module in the torch inductor module that ``guard`` changed."""
    _replaced.undo()
