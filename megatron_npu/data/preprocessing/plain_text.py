"""Read documents from plain-text files (``.txt``), each of which is one document."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import compressed
from megatron_npu.data.preprocessing.compressed import decompressed, plain_name, read
from megatron_npu.data.preprocessing.jsonl import Batch

_HEAD = 1 << 20  # bytes that are looked at


def is_plain_text(path: str) -> bool:
    """Return True if a file is a plain-text file, which is read as a single document.

    This is a ``.txt`` file whose first line is not a JSON object.

    Megatron's own tools ignore file names, so a ``.txt`` file may have been written for them with JSON lines.

    Raises:
        UsageError: the file cannot be read or decompressed.
    """
    if not plain_name(path).endswith(".txt"):
        return False
    with given_files.opened(path) as raw:
        head = read(decompressed(path, raw), path, _HEAD)
    first, end, _ = head.partition(b"\n")
    if len(head) == _HEAD and not end:  # a line that is too long to be looked at as a whole
        return not first.startswith(b'{"')
    try:
        return not isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return True


def batch(path: str, key: str) -> Batch:
    """Return a whole file as one JSON line that contains the text under ``key``, without a byte-order mark.

    Raises:
        UsageError: the file cannot be read or decompressed, or is not UTF-8.
    """
    with given_files.opened(path) as raw:
        stream = decompressed(path, raw)
        content = read(stream, path, compressed.MOST_BYTES + 1)
        compressed.require_plausible(path, len(content))
        content += read(stream, path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--input {path} must be plain text encoded in UTF-8, but byte {error.start} is not valid "
            "UTF-8. Convert it, for example with iconv; nothing was written."
        ) from error
    return Batch(path, 1, json.dumps({key: text}).encode(), Path(path).stat().st_size)
