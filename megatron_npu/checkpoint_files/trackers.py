"""Detect a tracker file that does not name the newest checkpoint in its folder."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from megatron_npu.checkpoint_files import checksums

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's name


@functools.cache
def tell_of_newer(place: Path) -> None:
    """Warn once, on rank 0, if there are checkpoints that are newer than the one that a tracker file names.

    Only checkpoints with checksums count, because checksums are written last.

    Args:
        place: the folder of that checkpoint, such as ``iter_0000003``.
    """
    own = _iteration(place)
    if own is None or os.environ.get("RANK", "0") != "0":
        return
    others = (each for each in place.parent.glob("iter_*") if (each / checksums.NAME).is_file())
    newer = sorted(number for number in map(_iteration, others) if number is not None and number > own)
    if newer:
        print(
            f"megatron_npu: warning: the tracker in {place.parent} names iteration {own}, but "
            f"there are newer checkpoints: {', '.join(map(str, newer))}. Write {newer[-1]} to the "
            "tracker, unless you set it back on purpose.",
            file=sys.stderr,
            flush=True,
        )


def _iteration(place: Path) -> int | None:
    number = place.name.removeprefix("iter_")
    return int(number) if number.isdecimal() else None
