"""Find and read the checkpoint files of each rank without executing code from them."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.safe_files import safe_load

# With the distributed optimizer, 285068c8 keeps the optimizer in files of its own.
NAMES = ("model_optim_rng.pt", "model_rng.pt")
_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
# What these files hold beside tensors, numbers and texts: arguments, enumerations, random states, loss
# scalers where they lived when NVIDIA's models were saved. Nothing of it is built, see safe_load.read.
_HARMLESS = frozenset(
    """
    io.BytesIO _io.BytesIO
    megatron.model.enums.ModelType megatron.enums.PositionEmbeddingType megatron.enums.ModelType
    megatron.core.transformer.enums.AttnMaskType megatron.core.transformer.enums.LayerType
    fp16.loss_scaler.LossScaler fp16.loss_scaler.DynamicLossScaler
    megatron.fp16.loss_scaler.LossScaler megatron.fp16.loss_scaler.DynamicLossScaler
    megatron.fp16_deprecated.loss_scaler.LossScaler megatron.fp16_deprecated.loss_scaler.DynamicLossScaler
    """.split()
)


@dataclass(frozen=True)
class RankFiles:
    """The checkpoint files of all ranks.

    Attributes:
        tensor, pipeline: the tensor- and pipeline-parallel sizes.
        paths: maps (tensor rank, pipeline rank) to the path of the file.
    """

    tensor: int
    pipeline: int
    paths: Mapping[tuple[int, int], Path]


def untracked(root: str | Path) -> Path | None:
    """Return the checkpoint in a directory without a tracker file, which is ``release/`` or the directory
    itself.

    A single ``model_optim_rng.pt`` is accepted too, given as a file or as its directory.
    """
    place = Path(root)
    places = (place / checkpoint_files.RELEASE, place.parent if place.name in NAMES else place)
    return next((found for found in places if holds_ranks(found)), None)


def holds_ranks(path: Path) -> bool:
    """Return True if a checkpoint's directory contains files in the format ``torch``."""
    return (
        any(_FOLDER.fullmatch(place.name) for place in path.glob("mp_rank_*")) or _file_in(path) is not None
    )


def _file_in(folder: Path) -> Path | None:
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def ranks(path: Path) -> RankFiles:
    """Find the checkpoint files of all ranks.

    Raises:
        UsageError: there are no files, or a rank's file is missing.
    """
    if alone := _file_in(path):
        return RankFiles(1, 1, {(0, 0): alone})
    paths = _by_rank(path)
    if not paths:
        raise _incomplete(path, f"the folder has no mp_rank_*/{NAMES[0]}")
    tensor, pipeline = (max(numbers) + 1 for numbers in zip(*paths, strict=True))
    wanted = {(t, p) for t in range(tensor) for p in range(pipeline)}
    if missing := sorted(wanted - paths.keys()):
        raise _incomplete(
            path, f"the folder has no file for tensor rank {missing[0][0]}, pipeline rank {missing[0][1]}"
        )
    return RankFiles(tensor, pipeline, paths)


def _by_rank(path: Path) -> dict[tuple[int, int], Path]:
    """Return the files that exist, keyed by tensor- and pipeline-parallel rank."""
    paths = {}
    for folder in sorted(path.glob("mp_rank_*")):
        named = _FOLDER.fullmatch(folder.name)
        file = _file_in(folder)
        if named and file:  # folders with optim.pt alone are the distributed optimizer's
            paths[int(named[1]), int(named[2] or 0)] = file
    return paths


def require_layout(found: RankFiles, path: Path, args: Mapping[str, Any]) -> None:
    """Check that the number of rank files equals the number of ranks in the stored arguments.

    Raises:
        UsageError: the numbers differ, because the files of the last ranks are missing.
    """
    tensor = args.get("tensor_model_parallel_size", args.get("model_parallel_size", found.tensor))
    pipeline = args.get("pipeline_model_parallel_size", found.pipeline)
    if (found.tensor, found.pipeline) != (tensor, pipeline):
        raise _incomplete(
            path,
            f"its files are for tensor-parallel {found.tensor} x pipeline-parallel "
            f"{found.pipeline}, but its arguments specify {tensor} x {pipeline}",
        )


def _incomplete(path: Path, what: str) -> UsageError:
    return UsageError(f"the checkpoint {path} is incomplete: {what}", remedy="Get the missing files.")


def read(file: Path) -> dict[str, Any]:
    """Return the content of the file of one rank.

    Tensors stay on disk until they are used.

    Raises:
        UsageError: the file is damaged, or contains something other than plain values.
    """
    content = safe_load.read(file, safe_load.OF_STOCK_SCRIPTS | _HARMLESS)
    if not isinstance(content, dict):
        raise safe_load.refusal(file, f"the file contains a {type(content).__name__}")
    return content


def arguments(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments stored in the file of one rank, or None if there are none.

    NVIDIA's first checkpoints contain no arguments.
    """
    args = content.get("args")
    return dict(vars(args)) if isinstance(args, Namespace) else None
