"""Start Python child processes that find this package and import nothing from the working directory.

For ``-m`` and ``-c``, Python searches the working directory first, which another user may control.
"""

from __future__ import annotations

import ctypes
import os
import signal
import site
import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parents[2]
# ``-c`` puts "" first; Python before 3.11 has no -P, and -I would leave out PYTHONPATH, too
_FROM_ELSEWHERE = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
_PR_SET_PDEATHSIG = 1  # prctl(2)
_RUN_MODULE = _FROM_ELSEWHERE + "import runpy; runpy.run_module(sys.argv.pop(1), None, '__main__', True)"


def module(name: str, arguments: Sequence[str] = (), options: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs a module like ``python -m``.

    Args:
        name: the name of the module.
        arguments: the arguments of the program.
        options: the options of the interpreter, such as ``-W ignore``.
    """
    return [sys.executable, *options, *module_flags(name), *arguments]


def module_flags(name: str) -> list[str]:
    """Return the arguments that follow ``python`` to run a module."""
    return ["-P", "-m", name] if sys.version_info >= (3, 11) else ["-c", _RUN_MODULE, name]


def ending_module(name: str, arguments: Sequence[str] = (), options: Sequence[str] = ()) -> list[str]:
    """Return the command line of ``module`` for a process that the kernel ends with this one (on Linux).

    Start it in the main thread: the kernel ends it with the thread that has started it.
    """
    if sys.platform != "linux":
        return module(name, arguments, options)
    ends = f"{__name__}.end_with({os.getpid()}, {int(signal.SIGKILL)})"
    first = f"{_FROM_ELSEWHERE}import {__name__}; {ends}; "
    return [sys.executable, *options, "-c", first + _RUN_MODULE, name, *arguments]


def end_with(starter: int, number: int) -> None:
    """Let the kernel send a signal to this process when the process that has started it ends (on Linux).

    Args:
        starter: the process that has started this one. If it is not the parent, because a server of forks has
            started this process for it, no signal is sent.
        number: the signal.

    Raises:
        SystemExit: the starter has already ended.
    """
    if sys.platform != "linux":
        return
    if os.getppid() == starter:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if not _is_alive(starter):
        raise SystemExit(1)


def _is_alive(process: int) -> bool:
    """Return False if a process has ended, also if nobody has read its exit code yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "XZ"


def code(statement: str) -> list[str]:
    """Return the command line that runs a statement like ``python -c``."""
    return [sys.executable, "-c", _FROM_ELSEWHERE + statement]


def search_path() -> str:
    """Return the PYTHONPATH for a child process, which contains this package and the user's entries.

    This package may not be installed. An installed package is not added, because its folder would shadow
    Python's own modules. Empty entries, as in ``export PYTHONPATH=$PYTHONPATH:/x``, are removed because they
    mean the working directory.
    """
    installed = [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]
    own = [] if _PACKAGES in installed else [str(_PACKAGES)]
    return os.pathsep.join([*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def search_first(folder: str) -> None:
    """Put a script's folder first on the module search path, as the interpreter does for scripts.

    The working directory is removed from the front of the search path.
    """
    sys.path[:] = [folder, *sys.path[sys.path[:1] in ([""], [os.getcwd()]) :]]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process with additional variables, for a child process."""
    return {**os.environ, "PYTHONPATH": search_path(), **variables}
