"""Replace numpy in upstream modules that use index files with functions that avoid pickle and write
atomically.

This module replaces numpy in the globals of those modules; all other names are numpy's own.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.safe_files import safe_load

_MAGIC = b"\x93NUMPY"


class DamagedIndexError(UsageError, ValueError):
    """Raised when an index file contains something that upstream never writes.

    Args:
        file: the path of the file.
        reason: the problem.
    """

    def __init__(self, file: str | Path, reason: str) -> None:
        self.file = Path(file)
        super().__init__(
            f"{file} is not an index that Megatron wrote: {reason}",
            remedy="Remove it; it will be built again.",
        )


def __getattr__(name: str) -> Any:
    return getattr(numpy, name)


def load(file: Any, *args: Any, **kwargs: Any) -> Any:
    """Load an array as ``numpy.load`` does, but without unpickling.

    Raises:
        DamagedIndexError: the file is truncated, or not a numpy file.
        UsageError: the file contains Python objects.
    """
    try:
        return numpy.load(file, *args, **{**kwargs, "allow_pickle": False})
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # numpy parses the file's header as Python
        if named := _pickled(Path(file)):
            raise UsageError(
                f"{file} contains a pickle that refers to {', '.join(sorted(named))}, but an index that "
                "Megatron writes contains only numbers",
                remedy="Remove it: Megatron did not write this file.",
            ) from error
        raise DamagedIndexError(file, str(error).partition("\n")[0]) from error


def _pickled(file: Path) -> set[str]:
    """Return the names in an index file that is a pickle, or a numpy file with an array of objects."""
    with contextlib.suppress(Exception), open(file, "rb") as stream:
        if stream.read(len(_MAGIC)) == _MAGIC:
            stream.seek(0)
            form = numpy.lib.format
            first = form.read_magic(stream)[0] == 1
            # to where the objects begin
            (form.read_array_header_1_0 if first else form.read_array_header_2_0)(stream)
        else:
            stream.seek(0)
        return safe_load.names_in_pickle(stream)
    return set()


def save(file: str, array: Any, **_: Any) -> None:
    """Save an array as ``numpy.save`` does, using a temporary file that is renamed when it is complete.

    Raises:
        ValueError: the array contains Python objects.
    """
    name = file if file.endswith(".npy") else file + ".npy"
    with files.writing(name) as stream:
        numpy.save(stream, array, allow_pickle=False)
