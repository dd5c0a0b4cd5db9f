"""Checksums of a checkpoint's files: written with it, compared before it is loaded.

They find damage (a disk, a copy that was cut off), not malice: who can change a file can change its checksum.
XXH3 with 128 bits, as the package xxhash computes it: more than 10 GB/s; the disk is what takes time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megatron_npu import files
from megatron_npu.errors import UsageError

NAME = "checksums.json"
ALGORITHM = "xxh3_128"
_BLOCK = 1 << 20  # bytes read at a time

Entries = dict[str, list[int | str]]  # of each file its bytes and digest


def write(folder: Path) -> None:
    """Write the checksums of all files in ``folder``. All ranks must call this when all are written.

    Each rank reads those that it has written itself: they are still in its machine's memory.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = [path for path in _all(folder) if _writer(path, ranks) == rank]
    parts: list[Entries] = [{}] * ranks
    dist.all_gather_object(parts, {path.relative_to(folder).as_posix(): _entry(path) for path in own})
    if rank == 0:
        _record(folder, {name: entry for part in parts for name, entry in part.items()})


def write_alone(folder: Path) -> None:
    """Write the checksums of all files in ``folder`` from one process, which reads them from disk."""
    _record(folder, {path.relative_to(folder).as_posix(): _entry(path) for path in _all(folder)})


def _record(folder: Path, entries: Entries) -> None:
    content = {"algorithm": ALGORITHM, "files": dict(sorted(entries.items()))}
    files.write(folder / NAME, json.dumps(content, indent=1))


def renew(path: Path) -> None:
    """Write the checksum of one file anew, which was changed on purpose. One process alone may do this."""
    recorded = path.parent / NAME
    if recorded.is_file():
        content = json.loads(recorded.read_text(encoding="utf-8"))
        content["files"][path.name] = _entry(path)
        files.write(recorded, json.dumps(content, indent=1))


_WHOLE = "--load-last-good takes the newest checkpoint there that is whole."


def verify(folder: Path, remedy: str = _WHOLE) -> None:
    """Compare all files with their checksums, each rank a part of them. All ranks must call this.

    Args:
        folder: of the checkpoint.
        remedy: what to do where one is damaged.

    Raises:
        UsageError: on every rank, naming what is damaged.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size()
    parts: list[list[str]] = [[]] * ranks
    dist.all_gather_object(parts, damaged(folder, dist.get_rank(), ranks))
    found = sorted(set().union(*parts))
    if found:
        raise UsageError(
            f"the checkpoint {folder} is damaged: {'; '.join(found)}",
            f"files as they were saved ({NAME})",
            remedy,
        )


def damaged(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Return what is wrong with the files of a checkpoint, nothing if it has no checksums.

    Args:
        part, parts: look at every ``parts``-th file only, beginning with number ``part``.
    """
    if not (folder / NAME).is_file():
        return []
    try:
        entries = _read(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"{NAME} cannot be read ({error})"]
    names = sorted(entries)[part::parts]
    return [f"{name} {fault}" for name in names if (fault := _fault(folder / name, entries[name]))]


def _all(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)


def _writer(path: Path, ranks: int) -> int:
    """Return the rank that wrote a file: ``__RANK_NUMBER.distcp`` names it, and rank 0 writes the rest."""
    number = path.name.removeprefix("__").split("_")[0]
    return int(number) % ranks if path.suffix == ".distcp" and number.isdecimal() else 0


def _read(folder: Path) -> Entries:
    content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    if content["algorithm"] != ALGORITHM:
        raise ValueError(f"algorithm {content['algorithm']!r}")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in content["files"]):
        raise ValueError("names of files elsewhere")
    return {name: [int(size), str(digest)] for name, (size, digest) in content["files"].items()}


def _fault(path: Path, entry: list[int | str]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry[0]:
            return f"has {size} bytes instead of {entry[0]}"
        return None if _digest(path) == entry[1] else "has other content than was saved"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _entry(path: Path) -> list[int | str]:
    return [path.stat().st_size, _digest(path)]


def _digest(path: Path) -> str:
    import xxhash

    digest, block = xxhash.xxh3_128(), bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()
