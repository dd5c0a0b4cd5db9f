"""Where the bytecode of Megatron's trees goes: never beside the sources, which tests leave as they are."""

from __future__ import annotations

import sys


def elsewhere() -> dict[str, str]:
    """Return variables for a process that imports from such a tree.

    With ``PYTHONPYCACHEPREFIX``, as in ``.ci/run``, Python keeps bytecode in that folder, and each source is
    compiled once for all processes; without it, none is written.
    """
    return {} if sys.pycache_prefix else {"PYTHONDONTWRITEBYTECODE": "1"}
