"""Write the JSON lines of a run, one object per event, which ``history`` and the dashboard read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError

_BEGIN = b'{"event":'  # of each line


def require_log(flag: str, file: Path) -> None:
    """Check that lines may be added to an existing file, which must not be data that a run reads.

    Args:
        flag: the flag that names the file.
        file: a regular file.

    Raises:
        UsageError: the file has content other than that of a log.
    """
    with files.regular(file) as stream:
        begin = stream.read(len(_BEGIN))
    if not _BEGIN.startswith(begin):  # an empty file, or the first piece of a line, may be continued
        raise UsageError(
            f"{flag} must be a new file or the log of a run, but {file} has other content",
            remedy="Use another path.",
        )


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
