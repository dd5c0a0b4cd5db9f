"""Copy complete checkpoints to object storage, and fetch the newest of them from there
(``--object-storage``).

Objects cannot be renamed, so a run writes each checkpoint to ``--save`` and then copies it. ``_SUCCESS`` is
the last object of a checkpoint; a checkpoint without it is never fetched. fsspec connects to the storage.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, disks, patience, trackers

MARK = "_SUCCESS"
FLAG = "--object-storage"
_LOCK = ".fetch.lock"
_UNFINISHED = ".unfinished"
_ATTEMPTS, _PAUSE = 3, 2.0  # seconds before the second attempt, twice as many before the third
_T = TypeVar("_T")


class UploadError(OSError):
    """Raised on all ranks when a checkpoint that is complete in ``--save`` could not be copied to object
    storage.
    """


@dataclass(frozen=True)
class Storage:
    """A folder of checkpoints in object storage.

    Attributes:
        address: as the user gave it.
        system: fsspec's file system.
        root: the path in it.
    """

    address: str
    system: Any
    root: str

    def path(self, *names: str) -> str:
        """Return the path of an object in the storage."""
        return "/".join([self.root.rstrip("/"), *names])

    def iterations(self) -> list[int]:
        """Return the iterations of complete checkpoints in ascending order."""
        found = self.system.glob(self.path("iter_*", MARK))
        names = (str(path).split("/")[-2].removeprefix("iter_") for path in found)
        return sorted(int(name) for name in names if name.isdecimal())

    def sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of the objects of a checkpoint, except its marker, keyed by their paths in the
        checkpoint.
        """
        begin = self.path(name) + "/"
        found = self.system.find(self.path(name), detail=True)
        return {
            path[path.index(begin) + len(begin) :]: entry["size"]
            for path, entry in found.items()
            if not path.endswith(f"/{MARK}")
        }

    def write(self, text: str, *names: str) -> None:
        """Write a small object to the storage."""
        with self.system.open(self.path(*names), "wb") as stream:
            stream.write(text.encode())


def opened(address: str) -> Storage:
    """Open the storage at an address, and return it.

    Raises:
        UsageError: the text is not an address, the package for its scheme is not installed, or its client
            cannot connect.
    """
    scheme = address.partition("://")[0]
    if "://" not in address:
        raise UsageError(
            f"{FLAG} must be the address of a folder in object storage, such as s3://BUCKET/run or "
            f"msc://PROFILE/run, but got {address}",
            remedy="Correct the address; for a folder in a file system, --save is enough.",
        )
    try:
        import fsspec

        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        system, root = fsspec.url_to_fs(address, use_listings_cache=False, **options)
    except ModuleNotFoundError as error:
        if error.name != "fsspec":
            raise _missing(address, scheme, error) from error
        raise UsageError(
            f"{FLAG} {address} requires the package fsspec, which is not installed",
            remedy="Run pip install fsspec.",
        ) from error
    except (ImportError, ValueError) as error:  # fsspec's own text names the package
        raise _missing(address, scheme, error) from error
    except Exception as error:  # each client has its own; some connect here already
        raise _unreadable(address, error) from error
    return Storage(address, system, root)


def _missing(address: str, scheme: str, error: Exception) -> UsageError:
    package = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "msc": "multi-storage-client"}.get(scheme)
    remedy = f"Run pip install {package}." if package else "Install fsspec's package for this scheme."
    return UsageError(f"{FLAG} {address}: fsspec cannot open {scheme}:// ({error})", remedy=remedy)


def _unreadable(address: str, error: Exception) -> UsageError:
    return UsageError(
        f"{FLAG} {address} cannot be read ({type(error).__name__}: {str(error)[:300]})",
        remedy="Check the address, the credentials and the network.",
    )


# -- saving


def upload(folder: Path) -> None:
    """Copy a complete checkpoint to the storage of this run, if it has one. All ranks must call this.

    Ranks divide the files. With a folder on each machine, each copies its own shards, and rank 0 the rest.

    Raises:
        UploadError: a file could not be copied. Raised on all ranks; ``_SUCCESS`` does not exist then.
    """
    address = disks.copies_to()
    if address is None:
        return
    storage = opened(address)
    leads = _rank() == 0
    _together(storage, folder, lambda: _forget(storage, folder.name) if leads else None)
    _together(storage, folder, lambda: _put(storage, folder, _own(folder)))
    _together(storage, folder, lambda: _declare(storage, folder.name) if leads else None)


def _own(folder: Path) -> list[str]:
    """Return those files of a checkpoint that this rank copies."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith((disks.NAME, ".nfs"))
    )
    several = disks.several()
    if several is None:
        rank, ranks = checksums.place()
        return names[rank::ranks]
    shards = [name for name in names if disks.is_shard(name)]
    own = shards[several.members.index(_rank()) :: len(several.members)]
    return own + (sorted(set(names) - set(shards)) if _rank() == 0 else [])


def _forget(storage: Storage, name: str) -> None:
    """Remove an earlier copy of a checkpoint, such as one that a killed run left incomplete.

    The mark goes first.
    """
    if storage.system.exists(storage.path(name, MARK)):
        storage.system.rm_file(storage.path(name, MARK))
    for each in storage.sizes(name):
        storage.system.rm_file(storage.path(name, each))


def _put(storage: Storage, folder: Path, names: list[str]) -> None:
    for name in names:
        there = storage.path(folder.name, name)
        _retried(functools.partial(storage.system.put_file, str(folder / name), there))


def _declare(storage: Storage, name: str) -> None:
    """Write the marker of a complete checkpoint, and then the tracker file."""
    _retried(lambda: storage.write("", name, MARK))
    _retried(lambda: storage.write(name.removeprefix("iter_").lstrip("0") + "\n", trackers.TRACKER))


def _together(storage: Storage, folder: Path, work: Callable[[], object]) -> None:
    """Do this rank's part of something, and wait for the others, which may take as long as they need.

    Raises:
        UploadError: a rank has failed.
    """
    reason: str | None = None

    def tried() -> None:
        nonlocal reason
        try:
            work()
        except Exception as error:  # each client has its own
            reason = f"{type(error).__name__}: {str(error)[:300] or 'no reason given'}"

    patience.done_by_all(tried)
    reasons = checksums.gathered(reason, checksums.place()[1])
    if failed := [(rank, each) for rank, each in enumerate(reasons) if each]:
        rank, each = failed[0]
        raise UploadError(
            f"the checkpoint {folder} is complete, but rank {rank} could not copy it to {storage.address} "
            f"({each}). Check the address, the credentials and the network."
        )


def _retried(work: Callable[[], _T]) -> _T:
    for attempt in range(1, _ATTEMPTS):
        with contextlib.suppress(Exception):  # each client has its own; the last attempt's is raised
            return work()
        time.sleep(attempt * _PAUSE)
    return work()


def _rank() -> int:
    return checksums.place()[0]


# -- loading


def fetch(address: str, load: str, step: int | None = None) -> None:
    """Make the newest complete checkpoint in object storage the newest one in the ``--load`` folder.

    Each process calls this before it looks for the checkpoint; one of those that share the folder copies it.

    Args:
        address: of the storage. If it has no complete checkpoint, nothing is changed.
        load: the folder.
        step: if given, the iteration of another checkpoint.

    Raises:
        UsageError: the storage cannot be read, does not have that checkpoint, or has an object in it whose
            path leads out of the folder.
    """
    storage = opened(address)
    try:
        found = _retried(storage.iterations)
        if step is not None and step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise UsageError(
                f"--ckpt-step {step}: {address} has no complete checkpoint of this iteration; the "
                f"complete checkpoints are: {there}",
                remedy="Pass one of them, or remove --ckpt-step.",
            )
        if not found:
            return
        root, iteration = Path(load), found[-1] if step is None else step
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            _bring(storage, root, iteration)
    except UsageError:
        raise
    except Exception as error:  # each client has its own
        raise _unreadable(address, error) from error


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    with open(root / _LOCK, "ab", opener=files.own_opener) as stream:
        with contextlib.suppress(OSError):  # a file system without locks: each process copies it
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _bring(storage: Storage, root: Path, iteration: int) -> None:
    """Copy a checkpoint to ``root`` unless it is already there, and update the tracker file."""
    name = f"iter_{iteration:07d}"
    sizes = _retried(lambda: storage.sizes(name))
    _require_inside(storage, name, sizes)
    if not _is_there(storage, root / name, sizes):
        part = _begun(storage, root, name)
        # the checksums first: they tell of which checkpoint a part is, should this process be killed
        for each in sorted(sizes, key=lambda path: path != checksums.NAME):
            _retried(functools.partial(_get, storage, name, part / each, each))
        files.replace_folder(root / name, part)
        print(f" fetched {root / name} from {storage.address}", flush=True)
    tracker = root / trackers.TRACKER
    text = f"{iteration}\n"
    if not tracker.is_file() or tracker.read_text(encoding="utf-8", errors="replace") != text:
        files.write(tracker, text)


def _require_inside(storage: Storage, name: str, paths: Iterable[str]) -> None:
    """Check that no object's path leads out of the checkpoint's folder, such as ``../x`` or ``//x``.

    Objects are named by whoever writes to the storage, and their names may contain anything.
    """
    for each in map(PurePosixPath, paths):
        if each.is_absolute() or ".." in each.parts:
            raise UsageError(
                f"{FLAG} {storage.address}: the path of the object {name}/{each} leads out of the "
                "checkpoint's folder, so this checkpoint is not fetched",
                remedy="Remove the object, or fetch another checkpoint with --ckpt-step.",
            )


def _begun(storage: Storage, root: Path, name: str) -> Path:
    """Return the hidden folder to fetch a checkpoint into, with the files that a killed run has fetched."""
    part = root / f".{name}.{uuid.uuid4().hex}.fetch"
    for left in root.glob(".iter_*.fetch"):
        if (
            left.name.startswith(f".{name}.")
            and not part.exists()
            and _has_same_checksums(storage, left, name)
        ):
            left.rename(part)
        else:
            shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True, exist_ok=True)
    for unfinished in part.rglob(f"*{_UNFINISHED}"):
        unfinished.unlink()
    return part


def _get(storage: Storage, name: str, path: Path, each: str) -> None:
    """Fetch an object, unless it is there; a file has its name only when it is complete."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        storage.system.get_file(storage.path(name, each), str(unfinished))
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _has_same_checksums(storage: Storage, folder: Path, name: str) -> bool:
    if not (folder / checksums.NAME).is_file():
        return False
    with storage.system.open(storage.path(name, checksums.NAME), "rb") as stream:
        return bool(json.loads(stream.read()) == json.loads(files.text(folder / checksums.NAME)))


def _is_there(storage: Storage, place: Path, sizes: dict[str, int]) -> bool:
    """Return True if a folder contains the files of a checkpoint, except for those of other machines."""
    away = disks.absent(place)
    for name, size in sizes.items():
        path = place / name
        if name not in away and (not path.is_file() or path.stat().st_size != size):
            return False
    return checksums.NAME in sizes and _has_same_checksums(storage, place, place.name)
