"""Control where the bytecode of Megatron's trees is stored: never next to the sources."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

_PREFIX = "PYTHONPYCACHEPREFIX"


def elsewhere() -> dict[str, str]:
    """Return environment variables for a process that imports from such a tree.

    If ``PYTHONPYCACHEPREFIX`` is set, as in ``.ci/run``, Python stores bytecode in that folder, and each
    source is compiled once for all processes. Otherwise, no bytecode is written.
    """
    return {} if sys.pycache_prefix else {"PYTHONDONTWRITEBYTECODE": "1"}


def kept() -> dict[str, str]:
    """Return the variable for a process with an environment of its own: its bytecode is this process's, too.

    Versions of Python share a folder: the names of the files in it differ.
    """
    return {_PREFIX: str(sys.pycache_prefix)} if sys.pycache_prefix else {"PYTHONDONTWRITEBYTECODE": "1"}


def keep(folder: Path) -> None:
    """Make this process and its children store all bytecode in ``folder``, unless another folder is set.

    Otherwise, each process of the suite would compile Megatron's trees again, and also this package if
    PYTHONDONTWRITEBYTECODE is set. Later runs of the suite use the bytecode in ``folder`` too.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not os.environ.get(_PREFIX):
        os.environ[_PREFIX] = str(folder)
        # of scripts that earlier runs have made
        shutil.rmtree(folder / Path(tempfile.gettempdir()).resolve().relative_to("/"), ignore_errors=True)
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ[_PREFIX], False
