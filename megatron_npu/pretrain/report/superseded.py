"""Move log entries that follow a killed run's last checkpoint to another file, so that no step is logged
twice.

The lines are moved to ``NAME.superseded.jsonl`` beside the file, so that nothing is lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_npu.base import files

_COUNTED = ("train", "validation", "sample", "rewind")  # events whose iteration has been computed


def place_of(path: Path) -> Path:
    """Return the path of the file to which superseded log lines are moved."""
    return path.with_name(f"{path.stem}.superseded{path.suffix or '.jsonl'}")


def put_aside(path: Path, iteration: int) -> None:
    """Move JSON lines about iterations after the start of this run to another file.

    A line about an interval that ends later is shortened: only the losses up to that iteration are kept.
    """
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept: list[bytes] = []
    aside: list[bytes] = []
    for line in lines:
        row = _row(line)
        if row is None or row["event"] not in _COUNTED or row["iteration"] <= iteration:
            kept.append(line)
            continue
        aside.append(line if line.endswith(b"\n") else line + b"\n")
        kept += _up_to(row, iteration)
    if aside:
        with open(place_of(path), "ab", opener=files.own_opener) as stream:
            stream.writelines(aside)
        files.write(path, b"".join(kept))


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the event in a log line, or None if the line is invalid or incomplete."""
    try:
        row = json.loads(line)
        known = isinstance(row, dict) and isinstance(row["event"], str) and type(row["iteration"]) is int
    except (ValueError, KeyError, RecursionError):
        return None
    return row if known else None


def _up_to(row: dict[str, Any], iteration: int) -> list[bytes]:
    """Return a log line for the part of an interval that precedes the checkpoint, or an empty list."""
    losses = row.get("losses")
    if row["event"] != "train" or not isinstance(losses, list):
        return []
    seen = losses[: max(0, iteration - row["iteration"] + len(losses))]
    numbers = [loss for loss in seen if isinstance(loss, (int, float))]
    if not seen:
        return []
    mean = sum(numbers) / len(numbers) if numbers else None
    cut = {"event": "train", "iteration": iteration, "loss": mean, "losses": seen}
    return [json.dumps(cut).encode() + b"\n"]
