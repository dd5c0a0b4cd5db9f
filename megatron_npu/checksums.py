"""Checksums of a checkpoint's files: written with it, compared before it is loaded.

They find damage (a disk, a copy that was cut off), not malice: who can change a file can change its checksum.
XXH3 with 128 bits, as the package xxhash computes it: more than 10 GB/s; the disk is what takes time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_npu import files
from megatron_npu.errors import UsageError

NAME = "checksums.json"
ALGORITHM = "xxh3_128"
_BLOCK = 1 << 20  # bytes read at a time
_AT_ONCE = 4  # files: one is hashed while the disk brings others

Entries = dict[str, list[int | str]]  # of each file its bytes and digest


def write(folder: Path) -> None:
    """Write the checksums of all files in ``folder``. All ranks must call this when all are written.

    Ranks share the files: the shards of torch_dist by the rank that has written each, which are still in its
    machine's memory; the folders ``mp_rank_…`` of the format torch in turns. Files that rank 0 does not see,
    on other machines' own disks, are left out.
    """
    rank, ranks = _place()
    found = {path.relative_to(folder).as_posix(): path for path in _all(folder)}
    own = {name: _entry(path) for name, path in found.items() if _writer(path, found, ranks) == rank}
    parts = _gathered(own, ranks)
    if rank == 0:
        together = {name: entry for part in parts for name, entry in part.items()}
        seen = {name: entry for name, entry in together.items() if (folder / name).is_file()}
        content = {"algorithm": ALGORITHM, "files": dict(sorted(seen.items()))}
        files.write(folder / NAME, json.dumps(content, indent=1))


def forget(folder: Path) -> None:
    """Remove the checksums of a checkpoint that is about to be written over. One process does this."""
    (folder / NAME).unlink(missing_ok=True)


def _place() -> tuple[int, int]:
    """Return this rank and the number of ranks, 0 and 1 for a process without any others."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gathered(own: Any, ranks: int) -> list[Any]:
    import torch.distributed as dist

    parts = [own] * ranks
    if ranks > 1:
        dist.all_gather_object(parts, own)
    return parts


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
    rank, ranks = _place()
    found = sorted(set().union(*_gathered(damaged(folder, rank, ranks), ranks)))
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
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # reading and hashing do not hold the interpreter's lock
        faults = pool.map(lambda name: _fault(folder / name, entries[name]), names)
        return [f"{name} {fault}" for name, fault in zip(names, faults, strict=True) if fault]


def newest_verified(root: Path) -> tuple[int | None, list[int]]:
    """Find the newest checkpoint under ``root`` that has checksums, and files that match them.

    Returns:
        Its iteration, None if there is none; and those of later ones, which are damaged or were not finished.
    """
    names = (path.name.removeprefix("iter_") for path in root.glob("iter_*") if path.is_dir())
    passed: list[int] = []
    for iteration in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
        folder = root / f"iter_{iteration:07d}"
        if (folder / NAME).is_file() and not damaged(folder):
            return iteration, passed
        passed.append(iteration)
    return None, passed


def newest_whole(root: str | Path) -> int | None:
    """Return the iteration that ``--load-last-good`` loads, and say what is passed over. Collective.

    Returns:
        None: there are no checkpoints.

    Raises:
        UsageError: there are some, and none is whole.
    """
    rank, ranks = _place()
    own = newest_verified(Path(root)) if rank == 0 else None
    iteration, passed = _gathered(own, ranks)[0]
    if iteration is None and passed:
        raise UsageError(
            f"--load {root} --load-last-good: none of {len(passed)} checkpoints is whole, or has checksums",
            f"at least one with a {NAME} that its files match",
            "`megatron-npu checkpoint verify` says what is wrong with each; `megatron-npu checkpoint sum` "
            "writes the checksums of one that you trust.",
        )
    if passed and rank == 0:
        names = ", ".join(map(str, sorted(passed)))
        print(f" {root}: damaged, and passed over: iterations {names}; loading {iteration}", flush=True)
    return iteration


def _all(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)


def _writer(path: Path, found: Mapping[str, Path], ranks: int) -> int:
    """Return the rank that hashes a file of those found: see ``write``."""
    number = path.name.removeprefix("__").split("_")[0]
    if path.suffix == ".distcp" and number.isdecimal():
        return int(number) % ranks
    if path.parent.name.startswith("mp_rank_"):
        return [*found.values()].index(path) % ranks
    return 0


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
