"""Check the files that a command is to write before it computes what goes into them."""

from __future__ import annotations

from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError


def require_writable(*outputs: str | Path | None) -> None:
    """Check that ``files.write`` will be able to write to each path; None stands for an output that is not
    requested.

    Raises:
        UsageError: a path is empty or a folder, its folder does not exist or is read-only, or its name is
            too long.
    """
    for file in outputs:
        if file is not None and (reason := _refusal(Path(file))):
            raise UsageError(
                f"{file} cannot be written: {reason}",
                remedy="Pass the path of a file in an existing folder, with a name of at most 200 bytes.",
            )


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
