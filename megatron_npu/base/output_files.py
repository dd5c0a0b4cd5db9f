"""Check the files that a command is to write before it computes what goes into them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError


def require_writable(*outputs: str | Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Check that ``files.write`` will be able to write to each path, and that it replaces no input and
    no other output.

    Args:
        outputs: the paths; None stands for an output that is not requested.
        inputs: the files and folders that the command reads; None stands for one that is not given.

    Raises:
        UsageError: a path is empty or a folder, its folder does not exist or is read-only, its name is too
            long, it is an input or lies in one, or two outputs have the same path.
    """
    paths = [Path(file) for file in outputs if file is not None]
    for file in paths:
        if reason := _refusal(file):
            raise UsageError(
                f"{file} cannot be written: {reason}",
                remedy="Pass the path of a file in an existing folder, with a name of at most 200 bytes.",
            )
    _require_distinct(paths, [Path(file) for file in inputs if file])


def _require_distinct(outputs: list[Path], inputs: list[Path]) -> None:
    names = [_name(output) for output in outputs]
    for output, name in zip(outputs, names, strict=True):
        for given in inputs:
            read = {_name(given), Path(os.path.realpath(given))}
            if name in read or read & {*name.parents}:
                raise UsageError(
                    f"{output} cannot be written: this command reads {given}, which the output would replace",
                    remedy="Use another path for the output.",
                )
    for output, name in zip(outputs, names, strict=True):
        if names.count(name) > 1:
            raise UsageError(
                f"each output must be a different file, but two of them are {output}",
                remedy="Use different files.",
            )


def _name(file: Path) -> Path:
    """Return the absolute path of a file. A link at the path is not followed, because it is replaced."""
    return Path(os.path.realpath(file.parent)) / file.name


def _refusal(file: Path) -> str:
    try:
        return _reason(file)
    except OSError as error:  # of a name that no file system takes, among others
        return error.strerror or "no reason given"


def _reason(file: Path) -> str:
    folder = file.absolute().parent
    if not file.name or file.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    if reason := files.refusal(folder):
        return f"the folder {folder} is not writable ({reason})"
    temporary = files.partial_file(file)
    files.created(temporary).close()
    temporary.unlink()
    return ""
