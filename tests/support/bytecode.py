"""Where the bytecode of Megatron's trees goes: never beside the sources, which tests leave as they are."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

_PREFIX = "PYTHONPYCACHEPREFIX"


def elsewhere() -> dict[str, str]:
    """Return variables for a process that imports from such a tree.

    With ``PYTHONPYCACHEPREFIX``, as in ``.ci/run``, Python keeps bytecode in that folder, and each source is
    compiled once for all processes; without it, none is written.
    """
    return {} if sys.pycache_prefix else {"PYTHONDONTWRITEBYTECODE": "1"}


def keep(folder: Path) -> None:
    """Let this process, and what it starts, keep all bytecode in ``folder``, unless another is named already.

    Otherwise each of the suite's processes would compile Megatron's trees again, and this package where
    PYTHONDONTWRITEBYTECODE is set. What is in ``folder`` serves later runs of the suite as well.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not os.environ.get(_PREFIX):
        os.environ[_PREFIX] = str(folder)
        # of scripts that earlier runs have made
        shutil.rmtree(folder / Path(tempfile.gettempdir()).resolve().relative_to("/"), ignore_errors=True)
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ[_PREFIX], False
