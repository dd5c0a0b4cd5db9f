"""Find the Megatron that a run would import, and the environment variables that would affect the run."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import patches
from megatron_npu.upstream import megatrons

# Beginnings of the environment variables that decide how a run behaves.
PREFIXES = (
    *("MEGATRON", "HCCL_", "NCCL_", "GLOO_", "ASCEND_", "CUDA_", "TORCH_", "PYTORCH_", "MASTER_", "OMP_"),
    *("RANK", "LOCAL_", "WORLD_SIZE", "TASK_QUEUE_"),
)


def put_on_path(path: str | None) -> str:
    """Put the Megatron that a run would import at the front of ``sys.path``.

    Return how it was found.

    The search order is ``path`` (default: ``MEGATRON_LM_PATH``), the checkout that contains this project (as
    in Ascend's guide), ``sys.path``, and the working directory.

    Raises:
        UsageError: ``path`` contains no Megatron.
    """
    path, given_by = megatrons.named(path)
    if path:
        root, found_by = megatrons.find(path, given_by).root, given_by
    elif around := _around_this_clone():
        root, found_by = (
            around.root,
            "the checkout that contains the clone of megatron_npu: scripts in the clone use it",
        )
    elif _first_on_path() is None and (here := megatrons.inside(Path.cwd())):
        root, found_by = here.root, "the working directory: only scripts in it import this Megatron"
    else:
        return "the Python path"
    sys.path.insert(0, str(root))
    return found_by


def _around_this_clone() -> megatrons.Upstream | None:
    """Return the Megatron that contains this project's clone in the working directory, or None."""
    here = Path.cwd()
    clones = (folder for folder in (here, *here.parents) if _is_clone(folder))
    return next((found for clone in clones if (found := megatrons.inside(clone.parent))), None)


def _is_clone(folder: Path) -> bool:
    return (folder / "tests_gpt").is_dir() and (folder / "megatron_npu" / "plugin.py").is_file()


def _first_on_path() -> megatrons.Upstream | None:
    try:
        return megatrons.find()
    except UsageError:
        return None


def megatron(found_by: str, *, pins: bool = True) -> dict[str, Any]:
    """Return the Megatron that would be imported, its location, the copies that it shadows, and its patches'
    states.

    ``pins`` compares each patch with the sources; this requires torch, because the adaptors import it.
    """
    try:
        found = megatrons.find()
    except UsageError as error:
        return {"error": str(error), **_here(None)}
    result: dict[str, Any] = {
        "upstream": found.name,
        "version": found.version,
        "root": str(found.root),
        "found_by": found_by,
        "shadowed": [f"{other} in {path}" for path, other in found.shadowed],
        **_here(found.root),
    }
    try:
        found.require_supported()
        verdicts = patches.verdicts(found) if pins else []
    except UsageError as error:
        return result | {"error": str(error)}
    result["pins"] = dict(Counter(verdict.status for verdict in verdicts))
    result["failing"] = [verdict.target for verdict in verdicts if verdict.fails]
    return result


def _here(used: Path | None) -> dict[str, str]:
    """Return the Megatron in the working directory if it differs from ``used``.

    Scripts started there use it.
    """
    found = megatrons.inside(Path.cwd())
    if found is None or found.root == used:
        return {}
    return {"working_directory": f"{found.version} in {found.root}"}


def environment() -> dict[str, str]:
    """Return the environment variables that would affect a run."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
