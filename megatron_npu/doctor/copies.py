"""Find the copy of this package that is in use, and other copies that a script in this folder would
import.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import megatron_npu

_NAME = "megatron_npu"


def copies(here: Path | None = None, path: Sequence[str] | None = None) -> dict[str, str]:
    """Return the copy of this package in use, how it was installed, and which copy a script in ``here`` would
    import.

    Args:
        here: the folder in which scripts are started (default: the working directory).
        path: the search path after ``here`` (default: ``sys.path``).
    """
    here = (here or Path.cwd()).resolve()
    used = Path(megatron_npu.__file__).resolve().parent
    found = {"used": str(used), "installed": _installed()}
    folder = here / _NAME
    if folder.is_dir() and not (folder / "__init__.py").is_file():
        found["folder"] = f"{folder} has the same name but is not this package"
    spec = PathFinder.find_spec(_NAME, [str(here), *(sys.path if path is None else path)])
    if spec is not None and spec.origin is None:  # folders alone; a finder of setuptools would come later
        found["hidden_by"] = str(folder)
    elif spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent != used:
        found["another"] = str(Path(spec.origin).parent)
    return found


def _installed() -> str:
    """Return how pip installed the package."""
    try:
        record = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return "not installed with pip; found on the Python path"
    source = json.loads(record) if record else {}
    place = source.get("url", "").removeprefix("file://")
    if source.get("dir_info", {}).get("editable"):
        return f"editable, from {place}"
    return f"a copy, from {place}" if place else "a copy"
