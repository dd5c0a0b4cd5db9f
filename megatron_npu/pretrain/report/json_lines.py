"""Write the JSON lines of a run, one object per event, which ``history`` and the dashboard read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from megatron_npu.base import files


class JsonLines:
    """Appends events to a JSON-lines file.

    Args:
        path: the file, which may exist already. If None, nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_line(path)

    def write(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        """Append one JSON object with the name of the event, its iteration and its values.

        NaN and infinite values become null.
        """
        if self.path is None:
            return
        row = {"event": event, "iteration": iteration, **values}
        with open(self.path, "a", encoding="utf-8", opener=files.own_opener) as stream:
            stream.write(json.dumps(_finite(row), allow_nan=False) + "\n")


def _end_line(path: Path) -> None:
    """End the line that a killed run left incomplete, so that the next line is readable."""
    with open(path, "ab+", opener=files.own_opener) as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read() != b"\n":
                stream.write(b"\n")


def _finite(value: Any) -> Any:
    """Replace infinite numbers and NaN in a value with None.

    JSON cannot represent them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
