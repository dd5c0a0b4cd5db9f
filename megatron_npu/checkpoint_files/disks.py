"""Save checkpoints in parts on the disks of several machines (``--save-per-machine``).

Ranks that see the same folder under one path share a disk, and the first of them acts for it. Each disk has
the shards of its own ranks and all small files: index, description, checksums, and ``machine.json``, which
lists the files on other machines. For loading, machines send each other the missing files; ``megatron-npu
checkpoint gather`` joins the parts.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import index

NAME = "machine.json"
_MARK = ".disk-of-rank."
_PATIENCE = 1.0  # seconds in which a mark of the same disk is seen
_PAUSE = 0.05
_CHUNK = 1 << 26  # bytes of a file that are sent at a time
_TIMEOUT = timedelta(hours=1)  # of one such chunk, which others' disks may hold up


@dataclass(frozen=True)
class Disks:
    """The disks on which a run stores a given folder, and the ranks that share each disk.

    Attributes:
        of_rank: for each rank, the first rank that sees the same disk.
        hosts: the host name of each of these first ranks.
        group: a gloo process group of these first ranks, or None if this rank is not one of them.
    """

    of_rank: tuple[int, ...]
    hosts: Mapping[int, str]
    group: Any

    @property
    def first(self) -> int:
        """The rank that acts for all ranks that share this rank's disk."""
        return self.of_rank[dist.get_rank()]

    @property
    def members(self) -> list[int]:
        """The ranks that have access to this rank's disk."""
        return [rank for rank, first in enumerate(self.of_rank) if first == self.first]


@dataclass
class _Run:
    """The state of the current run.

    Attributes:
        saves_into: the disks that the run saves to, or None if all ranks share one folder.
        copies_to: the address of the object storage that gets a copy of each checkpoint, if any.
    """

    saves_into: Disks | None = None
    copies_to: str | None = None


_run = _Run()


def copy_to(address: str | None) -> None:
    """From now on, copy all saved checkpoints to the given address in object storage, or to no address."""
    _run.copies_to = address or None


def copies_to() -> str | None:
    """Return the address to which this run copies its checkpoints, or None."""
    return _run.copies_to


def several() -> Disks | None:
    """Return the disks to which this run saves, or None if all ranks share one disk."""
    return _run.saves_into


def leads() -> bool:
    """Return True if this rank acts for all ranks that share its disk.

    If all ranks share one disk, rank 0 acts for it.
    """
    return not dist.is_initialized() or dist.get_rank() == (
        0 if _run.saves_into is None else _run.saves_into.first
    )


def save_into(folder: Path) -> None:
    """Determine which ranks share a disk, and store the result for later saves.

    All ranks must call this.
    """
    _run.saves_into = _found(folder)


def forget() -> None:
    """From now on, save to one shared folder again."""
    _run.saves_into = None


def _found(folder: Path) -> Disks | None:
    """Determine which ranks share the disk that contains ``folder``.

    Return None if all ranks share it.
    """
    mark = folder / f"{_MARK}{uuid.uuid4().hex}"
    error = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as raised:
        error = raised.strerror or "no reason given"
    marks = _gathered((mark.name, socket.gethostname(), error))
    faults = [f"{host}: {fault}" for _, host, fault in marks if fault]
    if faults:
        raise UsageError(f"the directory {folder} is not writable on {faults[0]}", remedy="Use another path.")
    seen = _gathered(_seen(folder, [name for name, _, _ in marks]))
    mark.unlink(missing_ok=True)
    of_rank = tuple(min(each) for each in seen)
    if not any(of_rank):
        return None
    firsts = sorted(set(of_rank))
    group = dist.new_group(firsts, timeout=_TIMEOUT, backend="gloo")
    hosts = {first: marks[first][1] for first in firsts}
    return Disks(of_rank, hosts, group if dist.get_rank() in hosts else None)


def _seen(folder: Path, names: list[str]) -> list[int]:
    """Return the ranks whose marker files this rank sees."""
    end = time.monotonic() + _PATIENCE
    while True:
        there = [rank for rank, name in enumerate(names) if (folder / name).is_file()]
        if len(there) == len(names) or time.monotonic() > end:
            return there
        time.sleep(_PAUSE)


def _gathered(own: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


# -- a part


def absent(folder: Path) -> dict[str, str]:
    """Return the files of a checkpoint that are on other machines, with the names of these machines.

    The result is empty if there are none.
    """
    elsewhere = _record(folder).get("elsewhere")
    if not isinstance(elsewhere, dict):
        return {}
    return {name: str(host) for name, host in elsewhere.items() if not (folder / name).is_file()}


def told(folder: Path) -> str | None:
    """Describe the part of a checkpoint that a folder contains, or return None if the checkpoint is
    complete.
    """
    away = absent(folder)
    if not away:
        return None
    return (
        f"only a part of a checkpoint, saved by {_record(folder).get('host')}; {len(away)} of "
        f"its files are on {_listed(away)}"
    )


def require_whole(folder: Path) -> None:
    """Check that a checkpoint to be read by a single process is complete, and not only one machine's part.

    Raises:
        UsageError: the folder contains only a part.
    """
    if part := told(folder):
        raise UsageError(
            f"{folder} is {part}; a complete checkpoint is required",
            remedy="Join the parts with `megatron-npu checkpoint gather`, or load it on the machines "
            "that saved it.",
        )


def _record(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads(files.text(folder / NAME))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _listed(away: Mapping[str, str]) -> str:
    return ", ".join(sorted(set(away.values())))


# -- saving


def complete(folder: Path) -> None:
    """Copy the small files of a checkpoint to every machine, with a list of the files on other machines.

    All ranks must call this after all of them have written. The call has no effect if the machines share one
    folder.

    Raises:
        FileNotFoundError: the index names a shard that no machine has. Raised on all ranks.
    """
    if _run.saves_into is None:
        return
    lost = None
    if _run.saves_into.group is not None:
        lost = _spread(folder, _run.saves_into)
    lost = _gathered(lost)[0]
    if lost:
        raise FileNotFoundError(
            f"{folder / lost} is listed in the checkpoint's index but is on none of the machines"
        )


def _spread(folder: Path, disks: Disks) -> str | None:
    """Run ``complete`` on the first rank of each disk.

    Return a shard that no machine has, or None.
    """
    listed: list[Any] = [None] * len(disks.hosts)
    folder.mkdir(parents=True, exist_ok=True)  # none of its ranks may have written
    own = _names(folder)
    dist.all_gather_object(listed, own, group=disks.group)
    places = dict(zip(disks.hosts, listed, strict=True))
    for name in sorted(set().union(*listed)):
        having = [first for first, names in places.items() if name in names]
        if not is_shard(name) and len(having) < len(places):
            _send(folder / name, min(having), name not in own, disks.group)
    host = {name: disks.hosts[first] for first, names in places.items() for name in names if is_shard(name)}
    content = {
        "host": disks.hosts[dist.get_rank()],
        "machines": [*disks.hosts.values()],
        "elsewhere": {name: host[name] for name in sorted(set(host) - set(own))},
    }
    files.write(folder / NAME, json.dumps(content, indent=1))
    return next(iter(sorted(index.shards(folder) - set(host))), None)


def publish(tracker: Path) -> None:
    """Copy the tracker file that rank 0 has written to every machine. All ranks must call this."""
    if _run.saves_into is None or _run.saves_into.group is None:
        return
    there = [tracker.is_file()]
    dist.broadcast_object_list(there, 0, group=_run.saves_into.group)
    if there[0]:
        _send(tracker, 0, dist.get_rank() != 0, _run.saves_into.group)


def is_shard(name: str) -> bool:
    """Return True if a file exists only on the machine of the rank that wrote it."""
    return name.endswith(".distcp") or name.startswith("mp_rank_")


def _names(folder: Path) -> list[str]:
    passing = (NAME, "checksums.json", ".nfs")
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(passing)
    )


def _send(path: Path, source: int, wanted: bool, group: Any) -> None:
    """Send a file to the other ranks of a process group.

    Only ranks with ``wanted`` write it.

    All ranks of the group must call this.
    """
    is_source = dist.get_rank() == source
    size = [path.stat().st_size if is_source else 0]
    dist.broadcast_object_list(size, source, group=group)
    if wanted:
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        reading = stack.enter_context(open(path, "rb")) if is_source else None
        writing = stack.enter_context(files.writing(path)) if wanted else None
        for begin in range(0, size[0], _CHUNK):
            chunk = bytearray(min(_CHUNK, size[0] - begin))
            if reading is not None:
                reading.readinto(chunk)
            dist.broadcast(torch.frombuffer(chunk, dtype=torch.uint8), source, group=group)
            if writing is not None:
                writing.write(chunk)


# -- loading


@contextlib.contextmanager
def whole(folder: Path | None) -> Iterator[None]:
    """Provide all files of a checkpoint on every machine while the ``with`` block loads it.

    All ranks must call this.

    Machines that have parts send each other the missing files, which are removed after the block.

    Args:
        folder: the checkpoint folder, or None on all ranks if there is nothing to load.

    Raises:
        UsageError: some files are on no machine. Raised on all ranks.
    """
    if folder is None or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    away = _gathered(sorted(absent(folder)))
    if not any(away):
        yield
        return
    disks = _found(folder)
    brought: list[Path] = []
    try:
        lost = None
        if disks is None:
            lost = away[0]
        elif disks.group is not None:
            lost = _bring(folder, disks, brought)
        every = _gathered(lost)  # and nobody reads before all is there
        if missing := sorted(set().union(*filter(None, every))):
            raise UsageError(
                f"{folder}: {len(missing)} files of the checkpoint are on none of these machines, for "
                f"example {missing[0]}; a checkpoint saved with --save-per-machine must be loaded on the "
                "machines that saved it",
                remedy="Start the run on those machines, or join the parts with `megatron-npu "
                "checkpoint gather`.",
            )
        yield
        dist.barrier()  # others of this machine read the same files
    finally:
        for path in brought:
            path.unlink(missing_ok=True)


def _bring(folder: Path, disks: Disks, brought: list[Path]) -> list[str]:
    """Fetch the files that are missing on the disk of this rank.

    Return those that no machine has.
    """
    listed: list[Any] = [None] * len(disks.hosts)
    dist.all_gather_object(listed, (_names(folder), sorted(absent(folder))), group=disks.group)
    places = {first: set(own) for first, (own, _) in zip(disks.hosts, listed, strict=True)}
    nowhere = []
    for name in sorted(set().union(*(away for _, away in listed))):
        having = [first for first, names in places.items() if name in names]
        if not having:
            nowhere.append(name)
            continue
        wanted = name not in places[dist.get_rank()]
        if wanted:
            brought.append(folder / name)
        _send(folder / name, min(having), wanted, disks.group)
    return nowhere
