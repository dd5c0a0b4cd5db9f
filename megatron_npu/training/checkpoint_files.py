"""Checkpoints as files: names, tracker, description; neither torch nor Megatron is needed to read them.

``<dir>/latest_checkpointed_iteration.txt`` names the newest ``<dir>/iter_0000010/``, as in Megatron. Beside
what ``megatron.core.dist_checkpointing`` writes, each has ``arguments.json``: the run's flags and position.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_npu import files
from megatron_npu.errors import UsageError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # Megatron's name, in tracker and directory, for weights that no run has trained here
DESCRIPTION = "arguments.json"
FILES = ("common.pt", "metadata.json", ".metadata")  # of megatron-core, beside those with the weights
CARRIED = "hf"  # in a converted checkpoint: the tokenizer's files, and others that came with the weights


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk.

    Attributes:
        path: its own directory.
        iteration: the iterations that it has seen.
        consumed_train_samples, consumed_valid_samples: position in the data.
        has_optimizer, has_rng: whether it holds them.
        optimizer_sharding: megatron-core's name for how a distributed optimizer was cut; else None.
        arguments: the flags of the run that wrote it, with what followed from them.
    """

    path: Path
    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    has_optimizer: bool
    has_rng: bool
    optimizer_sharding: str | None
    arguments: dict[str, Any]


def directory(root: str | Path, iteration: int) -> Path:
    """Return where the checkpoint of an iteration lies."""
    return Path(root) / f"iter_{iteration:07d}"


def find(root: str | Path) -> Found | None:
    """Return the newest checkpoint under ``root``, None if there is none.

    Raises:
        UsageError: the tracker names one that is not there, or one without a readable description.
    """
    place = newest(root)
    return None if place is None else _read(place)


def newest(root: str | Path) -> Path | None:
    """Return the directory of the newest checkpoint under ``root``, None if there is none.

    Raises:
        UsageError: the tracker names one that is not there.
    """
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != RELEASE and not text.isdecimal():
        raise UsageError(f"{tracker}: {text[:40]!r}", "a number of iterations", "Write it into the file.")
    path = Path(root) / RELEASE if text == RELEASE else directory(root, int(text))
    if not path.is_dir():
        raise UsageError(
            f"{tracker} names {path.name}, which is not there",
            "the name of a checkpoint beside it",
            "Write the iteration of one that is complete into the file.",
        )
    return path


def _read(path: Path) -> Found:
    description = path / DESCRIPTION
    try:
        values = json.loads(description.read_text(encoding="utf-8"))
        return Found(path=path, **values)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{description}: {reason}",
            "the description that `megatron-npu pretrain` writes into each checkpoint",
            "Load a checkpoint of this driver.",
        ) from error


def near(root: str | Path, path: str | None) -> str | None:
    """Return ``path`` if it is there; else what has its name in the checkpoint's directory, if anything.

    A converted checkpoint brings its tokenizer along, and may have been moved.
    """
    if path is None or Path(path).exists():
        return path
    places = (Path(root) / CARRIED / Path(path).name, Path(root) / Path(path).name)
    return next((str(place) for place in places if place.exists()), path)


def describe(path: Path, found: Found) -> None:
    """Write the description of a checkpoint into ``path``."""
    values = {name: value for name, value in vars(found).items() if name != "path"}
    files.write(path / DESCRIPTION, json.dumps(values, indent=1))


def plain_arguments(args: Namespace) -> dict[str, Any]:
    """Return the flags that JSON can hold, without those of this machine and process."""
    local = {"rank", "local_rank", "load_from", "load_optim", "load_rng"}
    return {name: value for name, value in sorted(vars(args).items()) if name not in local}


def release(root: str | Path, path: Path) -> Path:
    """Make a checkpoint the one that no run has trained here; return its new place."""
    place = Path(root) / RELEASE
    path.rename(place)
    files.write(Path(root) / TRACKER, f"{RELEASE}\n")
    return place


def set_latest(root: str | Path, iteration: int) -> None:
    """Make the tracker name ``iteration``."""
    files.write(Path(root) / TRACKER, f"{iteration}\n")
