"""Remove entries of search paths that lead to a working directory of another user.

An empty or relative entry, as in ``export CPATH=$CPATH:/x`` with an unset CPATH, means the working directory.
A compiler then takes headers, libraries and its own programs from there, and this project loads what it
compiles. Absolute entries are kept, because they name a folder that the user has chosen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from megatron_npu.base import files

VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
)


def environment() -> dict[str, str]:
    """Return the environment of this process without such entries, for a child process."""
    found = dict(os.environ)
    clean(found)
    return found


def clean(variables: MutableMapping[str, str]) -> list[str]:
    """Remove such entries from an environment, and return a message about each variable that has changed."""
    told = []
    for name in VARIABLES:
        entries = _entries(variables, name)
        reasons = {entry: reason for entry in entries if (reason := _reason(entry))}
        if not reasons:
            continue
        kept = [entry for entry in entries if entry not in reasons]
        if kept:
            variables[name] = os.pathsep.join(kept)
        else:
            del variables[name]
        entry, reason = next(iter(reasons.items()))
        told.append(f"the entry {entry!r} of {name} is ignored, because it leads to a folder that {reason}")
    return told


def _entries(variables: Mapping[str, str], name: str) -> list[str]:
    value = variables.get(name, "")
    return value.split(os.pathsep) if value else []


def _reason(entry: str) -> str:
    """Return the reason why an entry is ignored, or an empty string."""
    return "" if os.path.isabs(entry) else files.others(entry or os.curdir)
