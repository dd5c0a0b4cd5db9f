"""Reject archives whose content would take up far more memory than the file has bytes.

``torch.save`` stores its records without compression, so the records are together as large as the file. A
file from elsewhere can be compressed a thousandfold, or name the same bytes in many records.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from torch import serialization

from megatron_npu.base.errors import UsageError
from megatron_npu.base.replaced import Replaced

READER = "_open_zipfile_reader"  # how torch.load opens an archive
MOST_BYTES = 1 << 30  # by which the records of a file may be larger than the file


class ExpandedSizeError(UsageError):
    """Raised for an archive whose records are much larger than the file."""


def require_plausible(stream: IO[bytes]) -> None:
    """Check the sizes of an archive's records before torch reads them, without moving the stream's position.

    Raises:
        ExpandedSizeError: the records are too large.
    """
    at = stream.tell()
    try:
        size = stream.seek(0, os.SEEK_END)
        with zipfile.ZipFile(stream) as archive:
            expanded = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, NotImplementedError, struct.error, zipfile.BadZipFile):
        return  # torch says what is wrong with it
    finally:
        stream.seek(at)
    if expanded > size + MOST_BYTES:
        name = getattr(stream, "name", "a part of the checkpoint")
        raise ExpandedSizeError(
            f"{name} has {size:,} bytes, but its records expand to {expanded:,} bytes; torch.save does not "
            "compress, so both must be about equal",
            remedy="Do not load it if you do not trust it.",
        )


class _CheckedReader(serialization._open_zipfile_reader):
    """A reader of archives that calls ``require_plausible`` before torch's own reader."""

    def __init__(self, name_or_buffer: Any) -> None:
        if not isinstance(name_or_buffer, str | os.PathLike):
            require_plausible(name_or_buffer)
        super().__init__(name_or_buffer)


def check_in(replaced: Replaced) -> None:
    """Make ``torch.load`` check each archive until the replacement is undone."""
    replaced.set(serialization, READER, _CheckedReader)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Make ``torch.load`` check each archive inside the ``with`` block."""
    replaced = Replaced()
    check_in(replaced)
    try:
        yield
    finally:
        replaced.undo()
