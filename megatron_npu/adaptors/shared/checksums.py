"""Checksums in the checkpoints of stock scripts, which both Megatrons save and load alike.

Written with each, compared before it is loaded; ``--load-last-good`` passes over what is damaged.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_npu import checksums

WHY = "upstream loads files with flipped bits without a word, and trains on with other weights"
WHY_FLAGS = "--no-verify-checkpoint: neither write nor compare checksums; --load-last-good: pass over damage"
TRACKER = "latest_checkpointed_iteration.txt"
REMEDY = (
    "--load-last-good takes the newest one that is whole (`megatron-npu checkpoint verify` says which are)."
)


def add_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Declare ours after upstream's own flags."""
    parser = original(parser)
    parser.add_argument(
        "--no-verify-checkpoint",
        action="store_false",
        dest="verify_checkpoint",
        help="neither write checksums of checkpoints nor compare them",
    )
    parser.add_argument(
        "--load-last-good",
        action="store_true",
        help="load the newest checkpoint whose files match their checksums, and say which do not",
    )
    return parser


def folder(root: str | Path, iteration: int) -> Path:
    """Return where the scripts save the checkpoint of an iteration."""
    return Path(root) / f"iter_{iteration:07d}"


def begin_save(place: Path) -> None:
    """Let nobody compare the files of a checkpoint that is written over with the sums of the former one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        checksums.forget(place)


def write(place: Path) -> None:
    """Write the checksums of a checkpoint of the format torch. All ranks must call this."""
    if holds_ranks(place):
        checksums.write(place)


def holds_ranks(place: Path) -> bool:
    """Return whether a checkpoint is of the format torch."""
    return any(place.glob("mp_rank_*"))


def verify(place: Path) -> None:
    """Compare the files of a checkpoint. All ranks must call this.

    Raises:
        UsageError: naming what is damaged.
    """
    checksums.verify(place, REMEDY)


def of_tracker(root: str | Path) -> Path | None:
    """Return the checkpoint that the tracker under ``root`` names, None if there is none of a run."""
    tracker = Path(root) / TRACKER
    text = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else ""
    if text == "release":
        return Path(root) / text
    return folder(root, int(text)) if text.isdecimal() else None
