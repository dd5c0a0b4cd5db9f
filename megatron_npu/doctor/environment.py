"""Which Megatron a run would import, and which environment variables it would see."""

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


def put_on_path(path: str | None) -> None:
    """Put the Megatron in ``path`` (default: ``MEGATRON_LM_PATH``) first on this process's path.

    Raises:
        UsageError: there is no Megatron in ``path``.
    """
    path, given_by = megatrons.named(path)
    if path:
        sys.path.insert(0, str(megatrons.find(path, given_by).root))


def megatron(*, pins: bool = True) -> dict[str, Any]:
    """Return which Megatron would be imported, from where, what it hides, and how its patches stand.

    ``pins`` compares each patch with the sources, which takes torch, because adaptors import it.
    """
    try:
        found = megatrons.find()
    except UsageError as error:
        return {"error": str(error), **_here(None)}
    result: dict[str, Any] = {
        "upstream": found.name,
        "version": found.version,
        "root": str(found.root),
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
    """Return the Megatron in the working directory if it is another one: a script started here has it."""
    try:
        found = megatrons.find(Path.cwd())
    except UsageError:
        return {}
    return {} if found.root == used else {"working_directory": f"{found.version} in {found.root}"}


def environment() -> dict[str, str]:
    """Return the environment variables that decide how a run behaves."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
