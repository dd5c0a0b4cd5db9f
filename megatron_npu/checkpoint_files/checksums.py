"""Write checksums of the files of a checkpoint when it is saved, and verify them when it is loaded.

The checksums detect damage (a faulty disk, a truncated copy), not tampering: anyone who can change a file can
change its checksum. The checksums are 128-bit XXH3 digests, computed with the xxhash package at more than 10
GB/s, so the disk is the bottleneck. Sizes and small files are compared first; a thread compares large files
during loading, and loading succeeds only if they are undamaged.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import disks, index, shared_folder

NAME = "checksums.json"
ALGORITHM = "xxh3_128"
_BLOCK = 1 << 20  # bytes read at a time
_AT_ONCE = 4  # files: one is hashed while the disk brings others
_BESIDE = 1  # files beside a load: it reads one after the other too, and more of them slow it down
_SMALL = 1 << 22  # bytes of a file that is compared before anything is loaded

Entries = dict[str, list[int | str]]  # of each file its bytes and digest


def write(folder: Path) -> None:
    """Write the checksums of all files in ``folder``.

    All ranks must call this after all files are written.

    Ranks divide the work: each torch_dist shard is hashed by the rank that wrote it, from its machine's page
    cache; the ``mp_rank_…`` folders of the torch format are assigned to ranks in turn. If each machine keeps
    only a part, its ranks hash the files of that part, and each part gets the checksums of all files.

    Raises:
        FileNotFoundError: a rank does not see a file that another rank wrote, or a shard named in the index
            is missing. Raised on all ranks.
    """
    rank, ranks = place()
    several = disks.several()
    disks.complete(folder)
    found = {path.relative_to(folder).as_posix(): path for path in _all(folder)}
    if several is None:
        shared_folder.require_all(folder, {*found, *index.shards(folder)})
        own = {name: _entry(path) for name, path in found.items() if _writer(path, found, ranks) == rank}
    else:
        own = {
            name: _entry(found[name])
            for name in [*found][several.members.index(rank) :: len(several.members)]
        }
    parts = gathered(own, ranks)
    if rank == (0 if several is None else several.first):
        together = {name: entry for part in parts for name, entry in part.items()}
        content = {"algorithm": ALGORITHM, "files": dict(sorted(together.items()))}
        files.write(folder / NAME, json.dumps(content, indent=1))


def forget(folder: Path) -> None:
    """Remove the checksums of a checkpoint that is about to be overwritten. Only one process may do this.

    Unfinished checksum files are removed too, because a later ``write`` would treat them as files of the
    checkpoint.
    """
    (folder / NAME).unlink(missing_ok=True)
    files.remove_abandoned(folder / NAME)


def place() -> tuple[int, int]:
    """Return this rank and the number of ranks, which are 0 and 1 in a single-process run."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gathered(own: Any, ranks: int) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks."""
    import torch.distributed as dist

    parts = [own] * ranks
    if ranks > 1:
        dist.all_gather_object(parts, own)
    return parts


def renew(path: Path) -> None:
    """Update the checksum of one file after the file was changed intentionally.

    Only one process may do this.
    """
    recorded = path.parent / NAME
    if recorded.is_file():
        content = json.loads(files.text(recorded))
        content["files"][path.name] = _entry(path)
        files.write(recorded, json.dumps(content, indent=1))


_WHOLE = "--load-last-good loads the newest undamaged checkpoint there."


@contextlib.contextmanager
def verifying(folder: Path, remedy: str = _WHOLE) -> Iterator[None]:
    """Verify the checksums of files while the ``with`` block loads them. All ranks must call this.

    Each rank verifies a part of the files (``_readers``). Loaded data is valid only after the block has
    ended: if a file is damaged, the end of the block raises an error. If the block fails on some ranks, each
    of them reports the damage in its own part.

    Args:
        folder: the checkpoint folder; if it has no checksums, nothing is verified.
        remedy: advice in case of a damaged file.

    Raises:
        UsageError: a file is damaged; raised on every rank, unless the block failed.
    """
    rank, ranks = place()
    entries, faults = _entries(folder)
    if ranks == 1:
        disks.require_whole(folder)
    own = [name for name, reader in _readers(entries, ranks).items() if reader == rank]
    large = [name for name in own if int(entries[name][0]) > _SMALL]
    faults += _faults(folder, entries, set(own) - set(large))
    faults += [f"{name} {fault}" for name in large if (fault := _size_fault(folder / name, entries[name]))]
    _require_none(folder, gathered(faults, ranks), remedy)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(_faults, folder, entries, large, _BESIDE, stop)
        try:
            yield
            found = gathered(later.result(), ranks)
        except (KeyboardInterrupt, GeneratorExit):
            stop.set()
            raise
        except BaseException:  # CheckpointException of torch is no Exception
            _require_none(folder, [later.result()], remedy)
            raise
    _require_none(folder, found, remedy)
    if rank == 0 and not entries and not _is_being_written(folder):  # what the block refused was told
        _tell_of_none(folder)


def require_sizes(folder: Path, remedy: str = _WHOLE) -> None:
    """Compare the sizes of all files with the recorded sizes, without reading the files.

    Raises:
        UsageError: a file is missing or has a different size; the error names it.
    """
    entries, faults = _entries(folder)
    faults += [f"{name} {fault}" for name in entries if (fault := _size_fault(folder / name, entries[name]))]
    _require_none(folder, [faults], remedy)


def _is_being_written(folder: Path) -> bool:
    """Return True if one of our commands is still writing a folder, which is verified before it is
    renamed.
    """
    return any(parent.name.endswith(".partial") for parent in (folder, folder.parent))


@functools.cache
def _tell_of_none(folder: Path) -> None:
    print(
        f"megatron_npu: {folder} has no {NAME}, so damage to its files may not be "
        "detected; `megatron-npu checkpoint sum` writes it for a checkpoint that you trust",
        file=sys.stderr,
        flush=True,
    )


def require_whole(folder: Path, names: Iterable[str], remedy: str = _WHOLE) -> None:
    """Verify some files of a checkpoint immediately, and only in this process.

    Raises:
        UsageError: a file with a checksum, or the checksum file itself, is damaged.
    """
    entries, faults = _entries(folder)
    faults += _faults(folder, entries, set(names) & set(entries))
    _require_none(folder, [faults], remedy)


def _require_none(folder: Path, faults: Iterable[list[str]], remedy: str) -> None:
    found = sorted(set().union(*faults))
    if found:
        raise UsageError(f"the checkpoint {folder} is damaged: {'; '.join(found)}", remedy=remedy)


def damaged(folder: Path) -> list[str]:
    """Return the problems with the files of a checkpoint.

    Without checksums, only missing shards can be found.
    """
    entries, faults = _entries(folder)
    return sorted({*faults, *_faults(folder, entries, entries)})


def of_other_sizes(folder: Path) -> list[str]:
    """Return the files that are missing or have the wrong size, without reading the files."""
    entries, faults = _entries(folder)
    found = ((name, _size_fault(folder / name, entry)) for name, entry in sorted(entries.items()))
    return sorted({*faults, *(f"{name} {fault}" for name, fault in found if fault)})


def _entries(folder: Path) -> tuple[Entries, list[str]]:
    """Return the recorded checksums, and any problems with the record itself.

    Without records, both are empty.

    Checksums cover the files that existed when they were written; the index names all required shards. Files
    that are on other machines' disks are left out.
    """
    away = disks.absent(folder)
    faults = [f"{name} is missing" for name in index.missing(folder) if name not in away]
    if not (folder / NAME).is_file():
        is_there = os.path.lexists(folder / NAME)  # a pipe, or a link into nowhere
        return {}, [*faults, *([f"{NAME} is not a regular file"] if is_there else [])]
    try:
        return {name: entry for name, entry in _read(folder).items() if name not in away}, faults
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {}, [*faults, f"{NAME} cannot be read ({error})"]


def _faults(
    folder: Path,
    entries: Entries,
    names: Iterable[str],
    at_once: int = _AT_ONCE,
    stop: threading.Event | None = None,
) -> list[str]:
    """Return the problems with the given files.

    The GIL is released while files are read and hashed.
    """
    ordered = sorted(names)
    with ThreadPoolExecutor(at_once) as pool:
        faults = pool.map(lambda name: _fault(folder / name, entries[name], stop), ordered)
        return [f"{name} {fault}" for name, fault in zip(ordered, faults, strict=True) if fault]


def newest_verified(root: Path) -> tuple[int | None, list[int]]:
    """Find the newest checkpoint under ``root`` that has checksums and whose files are undamaged.

    Returns:
        Its iteration (None if there is none), and the iterations of later checkpoints, which are damaged or
        incomplete.
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
    """Return the iteration that ``--load-last-good`` loads, and log the iterations that it skips.

    All ranks must call this.

    Returns:
        The iteration, or None if there are no checkpoints.

    Raises:
        UsageError: there are checkpoints, but none of them is undamaged.
    """
    rank, ranks = place()
    own = newest_verified(Path(root)) if rank == 0 else None
    iteration, passed = gathered(own, ranks)[0]
    if iteration is None and passed:
        raise UsageError(
            f"--load {root} --load-last-good: none of the {len(passed)} checkpoints has files that match "
            f"its {NAME}",
            remedy="Run `megatron-npu checkpoint verify` to see the problem of each; `megatron-npu "
            "checkpoint sum` writes checksums for a checkpoint that you trust.",
        )
    if passed and rank == 0:
        names = ", ".join(map(str, sorted(passed)))
        print(
            f" {root}: skipping the damaged checkpoints of iterations {names}; loading {iteration}",
            flush=True,
        )
    return iteration


def _all(folder: Path) -> Iterable[Path]:
    passing = (NAME, disks.NAME, ".nfs")  # the last: of a network, removed while somebody reads
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(passing))


def _writer(path: Path, found: Mapping[str, Path], ranks: int) -> int:
    """Return the rank that computes the checksum of a file; see ``write``."""
    if (number := _number(path)) is not None:
        return number % ranks
    if path.parent.name.startswith("mp_rank_"):
        return [*found.values()].index(path) % ranks
    return 0


def _number(path: Path) -> int | None:
    """Return the rank that wrote a shard of a torch_dist checkpoint, given the shard's file name, or None."""
    number = path.name.removeprefix("__").split("_")[0]
    return int(number) if path.suffix == ".distcp" and number.isdecimal() else None


def _readers(names: Iterable[str], ranks: int) -> dict[str, int]:
    """Return the rank that verifies each file.

    The rank is the file's writer if the number of ranks is unchanged.

    The writer also loads that file, so its machine reads it only once. Otherwise, the ranks take turns.
    """
    found = {name: Path(name) for name in sorted(names)}
    if {_number(path) for path in found.values()} - {None} == {*range(ranks)}:
        return {name: _writer(path, found, ranks) for name, path in found.items()}
    return {name: turn % ranks for turn, name in enumerate(found)}


def _read(folder: Path) -> Entries:
    content = json.loads(files.text(folder / NAME))
    if content["algorithm"] != ALGORITHM:
        raise ValueError(f"the checksum algorithm {content['algorithm']!r} is unknown")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in content["files"]):
        raise ValueError("the checksum file lists files outside its folder")
    return {name: [int(size), str(digest)] for name, (size, digest) in content["files"].items()}


def _fault(path: Path, entry: list[int | str], stop: threading.Event | None) -> str | None:
    try:
        return _size_fault(path, entry) or _content_fault(path, entry, stop)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _size_fault(path: Path, entry: list[int | str]) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    return None if size == entry[0] else f"has {size} bytes instead of {entry[0]}"


def _content_fault(path: Path, entry: list[int | str], stop: threading.Event | None) -> str | None:
    return None if _digest(path, stop) in (entry[1], None) else "has different content from when it was saved"


def _entry(path: Path) -> list[int | str]:
    return [path.stat().st_size, str(_digest(path))]


def _digest(path: Path, stop: threading.Event | None = None) -> str | None:
    """Return the checksum of a file, or None if ``stop`` was set while it was being computed."""
    import xxhash

    digest, block = xxhash.xxh3_128(), bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            if stop is not None and stop.is_set():
                return None
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()
