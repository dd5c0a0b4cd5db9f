"""Join the parts of a checkpoint that are on several machines (``--save-per-machine``)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, disks, index


def join(parts: Sequence[Path], root: Path) -> tuple[Path, int]:
    """Copy the parts of one checkpoint into a new folder.

    Return the folder and its number of files.

    Args:
        parts: the iteration's folder on each machine's disk.
        root: the folder in which to create a folder of the same name.

    Raises:
        UsageError: the parts do not belong together, a file is missing or damaged, a link leads out of its
            part, or the folder already exists.
    """
    place = root / parts[0].name
    if place.exists():
        raise UsageError(
            f"--into must be a folder that does not contain {place.name} yet, but {place} already exists",
            remedy="Use another folder.",
        )
    if strange := next((part for part in parts if _identity(part) != _identity(parts[0])), None):
        raise UsageError(
            f"{parts[0]} and {strange} are not parts of the same checkpoint, because their "
            "indices or checksums differ",
            remedy="Pass folders of one run with --save-per-machine, and with --ckpt-step an iteration "
            "that all of them have.",
        )
    found = _files(parts)
    with files.new_folder(place) as folder:
        for name, source in found.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)  # without its mode: a setuid file would become this user's
        if faults := checksums.damaged(folder):
            raise UsageError(
                f"the part {parts[0].name} is damaged: {'; '.join(faults)}",
                remedy="Use an older iteration; `megatron-npu checkpoint verify` shows the damaged part.",
            )
    return place, len(found)


def _identity(part: Path) -> tuple[str, list[bytes]]:
    """Return the values that must be the same in all parts of a checkpoint."""
    paths = [part / name for name in (checksums.NAME, index.NAME)]
    return part.name, [path.read_bytes() for path in paths if path.is_file()]


def _require_inside(path: Path, part: Path) -> None:
    """Check that a file is not a link by which an unrelated file would become a part of the checkpoint."""
    if not path.resolve().is_relative_to(part.resolve()):
        raise UsageError(
            f"{path} is a link to {path.resolve()}, but every file of a part must be in its folder",
            remedy="Copy the file there if it belongs to the checkpoint; otherwise remove the link.",
        )


def _files(parts: Sequence[Path]) -> dict[str, Path]:
    """Return the location of each file of the checkpoint.

    Raises:
        UsageError: some files are in none of the parts, or a link leads out of its part.
    """
    found: dict[str, Path] = {}
    for part in parts:
        for path in sorted(part.rglob("*")):
            if path.is_file() and path.name != disks.NAME:
                _require_inside(path, part)
                found.setdefault(path.relative_to(part).as_posix(), path)
    away = {name: host for part in parts for name, host in disks.absent(part).items() if name not in found}
    for name in index.shards(parts[0]) - set(found):
        away.setdefault(name, "another machine")
    if away:
        name, host = min(away.items())
        raise UsageError(
            f"the given folders lack {len(away)} files of the checkpoint; one of them is {name}, which is "
            f"on {host}",
            remedy="Add the folder of that machine.",
        )
    return found
