"""Write and verify checksums for the checkpoints of stock scripts from every upstream.

Checksums are written with each checkpoint, before the tracker names the checkpoint, and are verified while it
is loaded. ``--load-last-good`` skips damaged checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_npu.base import digits, files
from megatron_npu.checkpoint_files import checksums, disks, shared_folder, trackers
from megatron_npu.options.shared_flags import add_shared

WHY = "upstream silently loads files with flipped bits, and continues training with wrong weights"
WHY_VERIFY = "--no-verify-checkpoint: neither write nor compare checksums"
WHY_FLAGS = f"{WHY_VERIFY}; --load-last-good: skip damaged checkpoints"
TRACKER, RELEASE = trackers.TRACKER, "release"
REMEDY = (
    "--load-last-good loads the newest undamaged checkpoint (`megatron-npu checkpoint verify` shows "
    "which are undamaged)."
)


def add_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Add ``--load-last-good`` and the flags of ``add_verify_flag`` after upstream's own flags."""
    parser = add_verify_flag(original, parser)
    parser.add_argument(
        "--load-last-good",
        action="store_true",
        help="load the newest checkpoint whose files match their checksums, and list the damaged ones",
    )
    return parser


def add_verify_flag(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Add the flags for checksums and saving that all checkouts have in common."""
    parser = original(parser)
    parser.add_argument(
        "--no-verify-checkpoint",
        action="store_false",
        dest="verify_checkpoint",
        help="neither write nor verify the checksums of checkpoints",
    )
    add_shared(parser.add_argument, "--save-per-machine")
    return parser


def folder(root: str | Path, iteration: int, *, release: bool = False) -> Path:
    """Return the folder of a checkpoint, which contains either an iteration or released weights."""
    return Path(root) / (RELEASE if release else f"iter_{iteration:07d}")


def begin_save(place: Path) -> None:
    """Remove the old checksums of a checkpoint that is about to be overwritten."""
    if disks.leads():
        checksums.forget(place)
        (place / disks.NAME).unlink(missing_ok=True)


@dataclass
class Save:
    """A save of a checkpoint that is in progress.

    Attributes:
        tracker: the file that will name the checkpoint.
        partial: the tracker's temporary name until the checkpoint is complete.
        afterwards: the functions to call once the tracker has its final name.
    """

    tracker: Path
    partial: Path
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    def publish(self) -> bool:
        """Rename the tracker if the script has written it. Return True if it was renamed."""
        if not self.partial.is_file():  # on rank 0 alone it is
            return False
        self.partial.replace(self.tracker)
        return True


_SAVE: ContextVar[Save | None] = ContextVar("tracks the save that is in progress", default=None)


def under_way() -> Save | None:
    """Return the script's save that is in progress, or None.

    An asynchronous save is returned only while it is being started.
    """
    return _SAVE.get()


@contextlib.contextmanager
def saving(root: str | Path, place: Path, *, verifies: bool) -> Iterator[None]:
    """Write checksums of the files that a script saves inside the ``with`` block, before the tracker names
    them.

    If a run is killed during the save, the tracker still names the previous checkpoint, which is complete.
    All ranks must call this.

    Args:
        root: the folder that contains the checkpoints.
        place: the folder of this checkpoint, in which the block leaves all its files.
        verifies: whether to write checksums.
    """
    with beginning(root, place) as save:
        yield
        if verifies:
            checksums.write(place)
        else:
            disks.complete(place)
        save.publish()  # DeepSpeed's engine writes none
        disks.publish(save.tracker)
        if dist.is_initialized():  # a rank that loads at once would not find the tracker yet
            dist.barrier()
    for do in save.afterwards:
        do()


@contextlib.contextmanager
def beginning(root: str | Path, place: Path) -> Iterator[Save]:
    """Allow a script to start a save inside the ``with`` block, while the tracker has a temporary name.

    Yields the save, whose tracker may also be published after the block.
    """
    tracker = Path(root, TRACKER)
    # no other user can guess the name and put a link there, through which the script would write
    partial = tracker.with_name(f"{tracker.name}.{secrets.randbelow(10**18)}.partial")
    save = Save(tracker, partial)
    if disks.leads():
        files.remove_abandoned(tracker)  # of runs that were killed while they saved
    begin_save(place)
    token = _SAVE.set(save)
    try:
        yield save
    finally:
        _SAVE.reset(token)


def tracker_to_write(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    """Return the path of the tracker file, or its temporary path while a save is in progress."""
    name, save = original(*args, **kwargs), under_way()
    return name if save is None else str(save.partial)


def named(tracker: str) -> str:
    """Return the final path of a tracker file, given its temporary path."""
    save = under_way()
    return tracker if save is None else str(save.tracker)


def is_first() -> bool:
    """Return True if this process is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def verifying(place: Path | None, remedy: str = REMEDY) -> contextlib.AbstractContextManager[None]:
    """Verify the files of a checkpoint while the ``with`` block loads it. All ranks must call this.

    Args:
        place: the checkpoint's folder. If None, nothing is verified.
        remedy: the advice to give if the checkpoint is damaged.

    Raises:
        UsageError: a file is damaged; the error names the file.
    """
    return contextlib.nullcontext() if place is None else checksums.verifying(place, remedy)


def require_same(root: str | Path, place: Path | None) -> None:
    """Check that all ranks load the same checkpoint, or that no rank loads one. All ranks must call this.

    Raises:
        UsageError: the machines of the ranks have different checkpoints under ``root``.
    """
    shared_folder.require_same("--load", root, place.name if place and place.is_dir() else None)


def is_release(root: str | Path) -> bool:
    """Return True if the tracker file under ``root`` names released weights instead of an iteration."""
    place = of_tracker(root)
    return place is not None and place.name == RELEASE


def to_load(root: str | Path, chosen: int | None = None) -> Path | None:
    """Return the checkpoint that a script will load, or None.

    Newer checkpoints are logged.

    Args:
        root: the folder that contains the checkpoints.
        chosen: the iteration given by a flag. If None, the iteration that the tracker names is used.
    """
    if chosen:
        return folder(root, chosen)
    place = of_tracker(root)
    if place is not None:
        trackers.tell_of_newer(place.resolve())
    return place


def of_tracker(root: str | Path) -> Path | None:
    """Return the checkpoint that the tracker file under ``root`` names, or None."""
    tracker = Path(root) / TRACKER
    text = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else ""
    if text == RELEASE:
        return folder(root, 0, release=True)
    number = digits.number(text)
    return None if number is None else folder(root, number)
