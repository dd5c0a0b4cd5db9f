"""Checksums in the checkpoints of stock scripts, which all Megatrons save and load alike.

Written with each, before the tracker names it; compared while it is loaded. ``--load-last-good`` passes over
what is damaged.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_npu import checksums, files

WHY = "upstream loads files with flipped bits without a word, and trains on with other weights"
WHY_VERIFY = "--no-verify-checkpoint: neither write nor compare checksums"
WHY_FLAGS = f"{WHY_VERIFY}; --load-last-good: pass over damage"
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
REMEDY = (
    "--load-last-good takes the newest one that is whole (`megatron-npu checkpoint verify` says which are)."
)


def add_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Declare ours after upstream's own flags."""
    parser = add_verify_flag(original, parser)
    parser.add_argument(
        "--load-last-good",
        action="store_true",
        help="load the newest checkpoint whose files match their checksums, and say which do not",
    )
    return parser


def add_verify_flag(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Declare the flag of all trees."""
    parser = original(parser)
    parser.add_argument(
        "--no-verify-checkpoint",
        action="store_false",
        dest="verify_checkpoint",
        help="neither write checksums of checkpoints nor compare them",
    )
    return parser


def folder(root: str | Path, iteration: int, *, release: bool = False) -> Path:
    """Return where the scripts save the checkpoint of an iteration, or weights that are released."""
    return Path(root) / (RELEASE if release else f"iter_{iteration:07d}")


def begin_save(place: Path) -> None:
    """Let nobody compare the files of a checkpoint that is written over with the sums of the former one."""
    if is_first():
        checksums.forget(place)


_unfinished: Path | None = None  # the tracker's temporary name, while a script saves


@contextlib.contextmanager
def saving(root: str | Path, place: Path, *, verifies: bool) -> Iterator[None]:
    """Let a script save inside the block; write the checksums, then let the tracker name the checkpoint.

    A run that is killed in between leaves the tracker at the checkpoint before, which is whole. All ranks
    must call this.

    Args:
        root: the folder of the checkpoints.
        place: that of this one, in which the block leaves all its files.
        verifies: whether checksums are wanted.
    """
    with beginning(root, place) as publish:
        yield
        if verifies:
            checksums.write(place)
        publish()  # DeepSpeed's engine writes none
        if dist.is_initialized():  # a rank that loads at once would not find the tracker yet
            dist.barrier()


@contextlib.contextmanager
def beginning(root: str | Path, place: Path) -> Iterator[Callable[[], bool]]:
    """Let a script begin to save inside the block; what it calls the tracker there is its temporary name.

    Gives a function that lets the tracker have its name once the script has written it, after the block,
    too, and returns whether it did.
    """
    global _unfinished
    tracker = Path(root, TRACKER)
    partial = files.partial_file(tracker)
    if is_first():
        files.remove_abandoned(tracker)  # of runs that were killed while they saved
    begin_save(place)

    def publish() -> bool:
        if not partial.is_file():  # on rank 0 alone it is
            return False
        partial.replace(tracker)
        return True

    _unfinished = partial
    try:
        yield publish
    finally:
        _unfinished = None


def tracker_to_write(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    """Return the name of the tracker, while a script saves that to write to."""
    name = original(*args, **kwargs)
    return name if _unfinished is None else str(_unfinished)


def named(tracker: str) -> str:
    """Return the name that a tracker will have."""
    return tracker if _unfinished is None else str(_unfinished.with_name(TRACKER))


def is_first() -> bool:
    """Return whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def verifying(place: Path | None, remedy: str = REMEDY) -> contextlib.AbstractContextManager[None]:
    """Compare the files of a checkpoint while the block loads it; nothing for None. All ranks must call this.

    Args:
        place: of the checkpoint.
        remedy: what to do where it is damaged.

    Raises:
        UsageError: naming what is damaged.
    """
    return contextlib.nullcontext() if place is None else checksums.verifying(place, remedy)


def is_release(root: str | Path) -> bool:
    """Return whether the tracker under ``root`` names weights that no run has written."""
    place = of_tracker(root)
    return place is not None and place.name == RELEASE


def of_tracker(root: str | Path) -> Path | None:
    """Return the checkpoint that the tracker under ``root`` names, None if there is none of a run."""
    tracker = Path(root) / TRACKER
    text = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else ""
    if text == RELEASE:
        return folder(root, 0, release=True)
    return folder(root, int(text)) if text.isdecimal() else None
