"""Python programs that this one starts: they find this package and search no working directory for modules.

Python looks for modules of ``-m`` and ``-c`` in the working directory first, which may be a stranger's.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parents[2]
# ``-c`` puts "" first; Python before 3.11 has no -P, and -I would leave out PYTHONPATH, too
_FROM_ELSEWHERE = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
_RUN_MODULE = _FROM_ELSEWHERE + "import runpy; runpy.run_module(sys.argv.pop(1), None, '__main__', True)"


def module(name: str, arguments: Sequence[str] = (), options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module, as ``python -m`` does.

    Args:
        name: of the module.
        arguments: of the program.
        options: of the interpreter, such as ``-W ignore``.
    """
    return [sys.executable, *options, *module_flags(name), *arguments]


def module_flags(name: str) -> list[str]:
    """Return what stands behind ``python`` for that."""
    return ["-P", "-m", name] if sys.version_info >= (3, 11) else ["-c", _RUN_MODULE, name]


def code(statement: str) -> list[str]:
    """Return the command that runs a statement, as ``python -c`` does."""
    return [sys.executable, "-c", _FROM_ELSEWHERE + statement]


def search_path() -> str:
    """Return the PYTHONPATH of a child: this package, which need not be installed, and what the user has set.

    Where it is installed it needs no place there: all other packages would come before Python's own modules.
    An empty entry, as ``export PYTHONPATH=$PYTHONPATH:/x`` makes one, would be the working directory.
    """
    installed = [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]
    own = [] if _PACKAGES in installed else [str(_PACKAGES)]
    return os.pathsep.join([*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def search_first(folder: str) -> None:
    """Look for modules in the folder of a script first, as the interpreter does for one that it is given.

    Where this process was told to look in the working directory first, that goes.
    """
    sys.path[:] = [folder, *sys.path[sys.path[:1] in ([""], [os.getcwd()]) :]]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment for such a child, with more variables."""
    return {**os.environ, "PYTHONPATH": search_path(), **variables}
