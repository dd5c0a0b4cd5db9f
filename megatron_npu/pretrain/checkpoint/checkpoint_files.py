"""Define the names of checkpoint files, and read the tracker file, without importing torch or Megatron.

As in Megatron, ``<dir>/latest_checkpointed_iteration.txt`` names the newest ``<dir>/iter_0000010/``. Besides
the files of ``megatron.core.dist_checkpointing``, each of these directories contains ``arguments.json``
(``checkpoint_description``).
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_npu.base import digits, files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import trackers

TRACKER = trackers.TRACKER
RELEASE = "release"  # Megatron's name, in tracker and directory, for weights that no run has trained here
DESCRIPTION = "arguments.json"
DESCRIPTION_OF_TRAIN = "run.json"  # the same of ``megatron-npu train``
COMMON = "common.pt"  # megatron-core's name for what is not sharded; since 0.19 an object beside the weights:
COMMON_OBJECT = "common_state/shard_0_1"
INDEX = ".metadata"  # torch's name for what says where each tensor is; written when all shards are
FILES = (COMMON, "metadata.json", INDEX)  # of megatron-core, beside those with the weights
OF_FSDP = "fsdp_dtensor"  # upstream's name for the format of Megatron's FSDP, and its optimizer's sharding
HF_FOLDER = "hf"  # in a converted checkpoint: the files of Hugging Face that came with the weights


def directory(root: str | Path, iteration: int) -> Path:
    """Return the directory for the checkpoint of an iteration."""
    return Path(root) / f"iter_{iteration:07d}"


def unfinished(root: str | Path) -> list[Path]:
    """Return the directories of checkpoints that a killed run left incomplete."""
    return sorted(Path(root).glob(files.partial_folder(Path("iter_*")).name))


def missing(path: Path) -> list[str]:
    """Return the names of megatron-core's files that are missing from a checkpoint's directory."""
    wanted = FILES[2:] if is_of_fsdp(path) else FILES
    absent = [name for name in wanted if not (path / name).is_file()]
    if COMMON in absent and common_lies_among_shards(path):
        absent.remove(COMMON)
    return absent


def is_of_fsdp(path: Path) -> bool:
    """Return True if the trainer saved the checkpoint with Megatron's FSDP.

    Such a checkpoint contains only torch's files.
    """
    try:
        values = json.loads(files.text(path / DESCRIPTION))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("optimizer_sharding") == OF_FSDP


def common_lies_among_shards(path: Path) -> bool:
    """Return True if unsharded values are stored as an object among the shards, as in 0.19 and later.

    The index is a pickle. The pickle is only searched for the object's name, and nothing is unpickled.
    """
    index = path / INDEX
    return index.is_file() and COMMON_OBJECT.encode() in index.read_bytes()


def no_checkpoint(root: str | Path) -> UsageError:
    """Return the error for a directory that contains no checkpoint."""
    return UsageError(
        f"--load {root} contains no checkpoint; it must be a directory with the file {TRACKER}",
        remedy=f"{right_folder(root)}.",
    )


def right_folder(root: str | Path) -> str:
    """Return advice about a directory that contains no checkpoint, without the final period.

    A directory of one iteration, which is a checkpoint itself, is a common mistake.
    """
    above = Path(root).parent
    if Path(root).name.startswith("iter_") and (above / TRACKER).is_file():
        return f"Use the directory above it, --load {above}"
    return "Correct the path"


def newest(root: str | Path, step: int | None = None) -> Path | None:
    """Return the directory of the newest checkpoint under ``root``, or None if there is none.

    Args:
        step: if given, return the checkpoint of this iteration instead (``--ckpt-step``).

    Raises:
        UsageError: the checkpoint that the tracker or ``step`` names does not exist.
    """
    if step is not None:
        return _of_iteration(root, step)
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    number = 0 if text == RELEASE else digits.number(text)
    if number is None:
        raise UsageError(
            f"{tracker} must contain an iteration number, but contains {text[:40]!r}",
            remedy="Write the iteration of a complete checkpoint into the file.",
        )
    path = Path(root) / RELEASE if text == RELEASE else directory(root, number)
    if not path.is_dir():
        raise UsageError(
            f"the tracker {tracker} names {path.name}, which does not exist in the same directory",
            remedy="Write the iteration of a complete checkpoint into the file.",
        )
    trackers.tell_of_newer(path.resolve())
    return path


def _of_iteration(root: str | Path, step: int) -> Path:
    path = directory(root, step)
    if not path.is_dir():
        there = ", ".join(map(str, iterations(root))) or "none"
        raise UsageError(
            f"--ckpt-step {step}: there is no {path.name} in {root}; the existing checkpoints are: {there}",
            remedy="Pass one of them, or remove --ckpt-step to load the newest."
            if there != "none"
            else "Remove it.",
        )
    return path


def iterations(root: str | Path) -> list[int]:
    """Return the iterations of the checkpoints under ``root`` in ascending order."""
    names = {path.name for path in Path(root).glob("iter_*") if path.is_dir()}
    steps = {int(number) for name in names if (number := name.removeprefix("iter_")).isdecimal()}
    # not those of folders such as iter_00000005, which nothing finds by its number
    return sorted(step for step in steps if directory(root, step).name in names)


def relocated(root: str | Path, path: str | None) -> str | None:
    """Return ``path`` if it exists, otherwise a file of the same name in the checkpoint's directory, or None.

    A converted checkpoint contains its tokenizer and may have been moved.
    """
    if path is None or Path(path).exists():
        return path
    places = (Path(root) / HF_FOLDER / Path(path).name, Path(root) / Path(path).name)
    return next((str(place) for place in places if place.exists()), path)


def release(root: str | Path, path: Path) -> Path:
    """Mark a checkpoint that this package did not train as ``release``, and return the new path."""
    place = Path(root) / RELEASE
    path.rename(place)
    files.write(Path(root) / TRACKER, f"{RELEASE}\n")
    return place


def set_latest(root: str | Path, iteration: int) -> None:
    """Write the number ``iteration`` to the tracker file."""
    files.write(Path(root) / TRACKER, f"{iteration}\n")
