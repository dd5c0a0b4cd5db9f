"""Check that the files in a data folder cannot make ``datasets`` read data from another place.

The header of a ``README.md`` names data files, and ``state.json`` names the files written by
``save_to_disk``. In both files, ``datasets`` also accepts paths outside the folder and web addresses. A link
of another user may lead to a file that only this user can read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError

_LISTS = ("_data_files", "_indices_data_files", "_indices_files")  # of a ``state.json``


def require_own_files(folder: Path, given: str) -> None:
    """Check that a folder written by ``save_to_disk`` refers only to its own files and subfolders.

    Args:
        folder: a folder with ``state.json`` or ``dataset_dict.json``; all other folders are left to
            ``datasets``.
        given: the flag and its value, used in the error message.

    Raises:
        UsageError: a file of the folder refers to a path outside the folder, or a link leads there.
    """
    require_no_link_of_others(folder, given)
    splits = _texts(_content(folder / "dataset_dict.json").get("splits"))
    for split in splits:
        _require(_is_own(split), folder / "dataset_dict.json", split, given)
    for part in [folder, *(folder / split for split in splits)]:
        content = _content(part / "state.json")
        entries = [entry for name in _LISTS for entry in content.get(name) or [] if isinstance(entry, dict)]
        for name in _texts([entry.get("filename") for entry in entries]):
            _require(_is_own(name), part / "state.json", name, given)


@contextlib.contextmanager
def own_files_alone(name: str, given: str) -> Iterator[None]:
    """Restrict ``datasets`` to data files inside a folder or, for a dataset on the hub, to web addresses.

    Args:
        name: the folder, or the name on the hub.
        given: the flag and its value, used in the error message.

    Raises:
        UsageError: a link leads out of the folder; or, in the block, a data file is outside of it.
    """
    from datasets import data_files

    resolve = data_files.resolve_pattern
    folder = Path(name).resolve() if Path(name).is_dir() else None
    if folder:
        require_no_link_of_others(folder, given)

    def resolve_inside(pattern: str, base_path: str, *args: Any, **kwargs: Any) -> list[str]:
        place = f"{folder}/README.md" if folder else f"the card of {name}"
        _require(_is_inside(pattern, base_path, folder), place, pattern, given)
        return resolve(pattern, base_path, *args, **kwargs)

    data_files.resolve_pattern = resolve_inside
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


def require_no_link_of_others(folder: Path, given: str) -> None:
    """Check that no link of another user leads from a folder to a place outside of it.

    Links of this user and of root, such as those of the hub's cache, may lead anywhere.

    Args:
        folder: the folder, which is searched with its subfolders.
        given: the flag and its value, used in the error message.

    Raises:
        UsageError: there is such a link.
    """
    whole = folder.resolve()
    for place, folders, names in os.walk(whole):
        for path in (Path(place, name) for name in (*folders, *names)):
            if path.is_symlink() and files.is_of_others(path.lstat()) and not _leads_inside(path, whole):
                raise UsageError(
                    f"{given}: {path} is a link of user {path.lstat().st_uid} to {os.readlink(path)!r}, "
                    "which is outside the folder",
                    "a folder whose files refer only to files in it",
                    "Put the file into the folder, or pass the file itself if you want to read it.",
                )


def _leads_inside(link: Path, folder: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):  # a loop, which leads nowhere
        return True


def _is_inside(pattern: str, base: str, folder: Path | None) -> bool:
    """Return True if it is allowed to read the files that match ``pattern`` relative to ``base``.

    See ``own_files_alone``.
    """
    if folder is None:
        return "://" in pattern or ("://" in base and _is_own(pattern))
    if "://" in f"{base}{pattern}" or "::" in pattern:
        return False
    return Path(os.path.abspath(Path(base, pattern))).is_relative_to(folder) or (
        Path(os.path.abspath(base)).resolve().is_relative_to(folder) and _is_own(pattern)
    )


def _is_own(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "://" not in name


def _require(own: bool, place: object, name: str, given: str) -> None:
    if not own:
        raise UsageError(
            f"{given}: {place} refers to {name!r}, which is outside its folder; the files of a folder may "
            "refer only to files in the same folder. Put the file into the folder, or pass the file itself "
            "if you want to read it."
        )


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty dict if the file is invalid.

    ``datasets`` itself rejects invalid files.
    """
    try:
        content = json.loads(files.text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _texts(values: Any) -> list[str]:
    return [value for value in values or [] if isinstance(value, str)] if isinstance(values, list) else []
