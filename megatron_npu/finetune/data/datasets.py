"""Load the splits of a dataset with the ``datasets`` package, from the hub's cache, from files or from a
folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_npu.base.errors import UsageError
from megatron_npu.data import dataset_folders, hub
from megatron_npu.data.preprocessing.bad_rows import FLAG
from megatron_npu.data.preprocessing.hf_rows import CSV
from megatron_npu.finetune.data import skipped_rows, text_files
from megatron_npu.finetune.data.parts import Parts
from megatron_npu.finetune.run.flag_parts import DataFlags

if TYPE_CHECKING:
    from datasets import Dataset

# the builder of each format, with its options
_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", CSV),
    ".tsv": ("csv", {**CSV, "sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {}),
}
# what the parts are called; mnli of GLUE has two to validate on, and its own is the matched one
_PARTS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "validation_matched"),
    "test": ("test", "test_matched"),
}
# what may stand behind a part's name in that of its file: a number, of how many, a hash, as the hub has it
_PIECE = re.compile(r"([-_.]\d+([-_.]of[-_.]\d+)?([-_.][0-9a-f]{16})?)?")


def load(flags: DataFlags, skipped: skipped_rows.Skipped | None = None) -> Parts:
    """Return the splits ``train`` and ``validation`` of a dataset, and ``test`` if it exists.

    Args:
        flags: ``data_path`` is a file, a folder with a file per split, a folder written by ``save_to_disk``,
            or the name of a hub dataset, whose configuration is ``data_name``; if there is no validation
            split, ``validation_fraction`` and ``seed`` determine which rows of ``train`` are used for
            validation.
        skipped: the object that collects malformed rows. If None, the first malformed row raises an error.

    Raises:
        UsageError: the dataset does not exist, a file cannot be read, or a split is missing or empty.
    """
    name, config = named(flags)
    files = _files_named(Path(name), config)
    rows: Mapping[str, Sequence[int]] = {}
    if skipped is not None and files:
        found, rows = _sound(name, config, files, skipped)
    else:
        found = _read(name, config, files)
    owns = _own_names(found)
    parts = Parts({part: found[owns[part]] for part in _PARTS if part in owns}, files)
    for part in parts.keys() & rows.keys():
        parts.tell_rows(part, rows[part])
    if "train" not in parts:
        raise UsageError(
            f"--data-path {name} must have a split named 'train', but its splits are "
            f"{', '.join(map(repr, found))}. Pass a file to train on, or a folder that contains train.csv, "
            "train.jsonl, ..."
        )
    if "validation" not in parts:
        test = parts.pop("test", None)  # parts are in their order, train first
        parts.split("train", _split(name, len(parts["train"]), flags.validation_fraction, flags.seed))
        parts |= {} if test is None else {"test": test}
    return parts


def _sound(
    name: str, config: str | None, files: Mapping[str, list[Path]], skipped: skipped_rows.Skipped
) -> tuple[Mapping[str, Dataset], dict[str, list[int]]]:
    """Return the valid rows of the files together with their row numbers.

    The rows are not cached.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-npu-") as folder:
        copies, rows = skipped_rows.copies(files, Path(folder), skipped)
        return _read(name, config, copies, {"keep_in_memory": True, "cache_dir": folder}), rows


def named(flags: DataFlags) -> tuple[str, str | None]:
    """Return the name or path of the dataset, and its configuration.

    Raises:
        UsageError: several paths are given.
    """
    if not isinstance(flags.data_path, str):
        raise UsageError(
            f"--data-path accepts only one path, but got {' '.join(flags.data_path)}. Pass a folder that "
            "contains the files, or a single file."
        )
    return flags.data_path, flags.data_name


def _own_names(found: Mapping[str, Any]) -> dict[str, str]:
    """Map each split to the key under which ``found`` contains it."""
    owns: dict[str, str] = {}
    for part, names in _PARTS.items():
        for own in names:
            if own in found:
                owns[part] = own
                break
    return owns


def _saved(path: Path) -> list[str]:
    """Return the names of the marker files that ``save_to_disk`` has written to a folder."""
    return [file for file in ("dataset_dict.json", "state.json") if (path / file).is_file()]


def _files_named(path: Path, config: str | None) -> dict[str, list[Path]]:
    """Return the files of each split, or an empty dict if the dataset is not a file or a folder of files.

    Raises:
        UsageError: the folder has no file for any split.
    """
    if path.is_file():
        return {"train": [path]}
    if path.is_dir() and config is None and not _saved(path):
        return _files_of_parts(path)
    return {}


def _read(
    name: str, config: str | None, files: Mapping[str, list[Path]], kept: Mapping[str, Any] | None = None
) -> Mapping[str, Dataset]:
    """Read the files, and return the rows of each split.

    ``kept`` contains the cache options for reading files.
    """
    library = _library()
    if config is not None:
        _require_configurations(name, config)
    try:
        with _without_remarks(library):
            return _files(library, files, kept or {}) if files else _opened(library, name, config)
    except UsageError:
        raise
    except Exception as error:  # builders raise what their parsers do
        raise _refused(name, config, files, error) from error


def _require_configurations(name: str, config: str) -> None:
    """Reject ``--data-name`` for a file or a ``save_to_disk`` folder, which have no configurations."""
    saved = _saved(Path(name))
    if saved or Path(name).is_file():
        raise UsageError(
            f"--data-name {config} cannot be used with --data-path {name}, because "
            f"{'a folder written by save_to_disk' if saved else 'a file'} has no configurations. Remove "
            "--data-name."
        )


def _opened(library: Any, name: str, config: str | None) -> Mapping[str, Dataset]:
    """Load the dataset from a ``save_to_disk`` folder or by its name."""
    path = Path(name)
    saved = _saved(path)
    if saved:
        dataset_folders.require_own_files(path, f"--data-path {name}")
        found = library.load_from_disk(str(path))
        return found if "dataset_dict.json" in saved else {"train": found}
    if path.suffix in _FORMATS and not path.exists():
        raise FileNotFoundError("no such file")
    return _of_the_hub(library, name, config)


@contextlib.contextmanager
def _without_remarks(library: Any) -> Iterator[None]:
    """Silence the log messages of ``datasets``, because its exceptions contain the same information."""
    before = library.logging.get_verbosity()
    library.logging.set_verbosity(library.logging.CRITICAL)
    try:
        yield
    finally:
        library.logging.set_verbosity(before)


def _of_the_hub(library: Any, name: str, config: str | None) -> Mapping[str, Dataset]:
    """Load a dataset by its name: one that is already prepared, one on the hub, or one in the hub's cache.

    Without a network connection, ``datasets`` finds only the datasets that it has prepared itself, and not
    those that were downloaded with ``hf download --repo-type dataset``.
    """
    hub.use_cache_if_silent(name)
    try:
        with dataset_folders.own_files_alone(name, f"--data-path {name}"):
            return library.load_dataset(name, config, cache_dir=_cache_of_a_folder(library, Path(name)))
    except UsageError:
        raise
    except Exception:
        copy = None if Path(name).exists() else _downloaded(name)
        if copy is None:
            raise
        with dataset_folders.own_files_alone(copy, f"--data-path {name}"):
            return library.load_dataset(copy, config)


def _cache_of_a_folder(library: Any, folder: Path) -> str | None:
    """Return the cache folder for rows from a local folder, or None for the default cache folder.

    The path of the folder depends on the files. Otherwise, for a folder with configurations, ``datasets`` 5.2
    would continue to use the rows that it prepared first, even after the files have changed.
    """
    if not folder.is_dir():
        return None
    files = [(file, file.stat()) for file in sorted(folder.rglob("*")) if file.is_file()]
    facts = repr([(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in files])
    name = f"folder-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    return str(Path(library.config.HF_DATASETS_CACHE) / name)


def _downloaded(name: str) -> str | None:
    """Return the folder of a dataset in the hub's cache, or None if the dataset is not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _files_of_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split, such as ``train.csv`` or ``train-00000-of-00002.parquet``.

    If a split has files under several of its names, only the first name is used, which matches the hub's
    behavior: ``validation.csv`` and ``dev.csv`` are not combined, and ``validation_mismatched.csv`` does not
    belong to ``validation``.
    """
    dataset_folders.require_no_link_of_others(folder, f"--data-path {folder}")
    every = [path for path in sorted(folder.iterdir()) if path.suffix in _FORMATS and path.is_file()]
    parts: dict[str, list[Path]] = {}
    for part, names in _PARTS.items():
        by_name = ([path for path in every if _is_of(path, name)] for name in names)
        if own := next(filter(None, by_name), []):
            parts[part] = own
    if not parts and len(every) == 1:
        parts["train"] = every
    if not parts:
        raise UsageError(
            f"--data-path {folder}: the folder has no file for any split; a split's file must be named "
            f"train, validation or test, with the extension {', '.join(_FORMATS)}. Name the files train.csv "
            "and so on, or pass a single file."
        )
    return parts


def _is_of(path: Path, part: str) -> bool:
    """Return True if the name of a file identifies it as a whole split or as one piece of a split."""
    name = path.name.removesuffix(path.suffix)
    return name.startswith(part) and _PIECE.fullmatch(name.removeprefix(part)) is not None


def _files(library: Any, parts: Mapping[str, list[Path]], kept: Mapping[str, Any]) -> Mapping[str, Dataset]:
    every = [path for paths in parts.values() for path in paths]
    suffixes = sorted({path.suffix for path in every})
    if len(suffixes) > 1 or suffixes[0] not in _FORMATS:
        raise UsageError(
            f"--data-path: all files must have the same extension, one of {', '.join(_FORMATS)}, but the "
            f"files have {' and '.join(suffixes) or 'no extension'}. Convert them to one format."
        )
    builder, options = _FORMATS[suffixes[0]]
    for path in every:
        _require_readable(path, builder, options)
    names = {part: [str(path) for path in paths] for part, paths in parts.items()}
    return library.load_dataset(builder, data_files=names, **options, **kept)


def _split(name: str, count: int, fraction: float, seed: int) -> dict[str, Sequence[int]]:
    """Split the rows at random with ``seed``, and return the row numbers for training and for validation."""
    rows = round(count * fraction) if fraction else 0
    if not 0 < rows < count:
        kind = "".join(Path(name).suffixes) if Path(name).is_file() else ".csv"
        raise UsageError(
            f"--data-path {name}: the number of rows, {count}, is too small for a split into training and "
            f"validation rows with --validation-fraction {fraction:g}. Add a file named validation{kind}, "
            "or pass a larger --validation-fraction."
        )
    numbered = _library().Dataset.from_dict({"row": range(count)})
    both = numbered.train_test_split(test_size=rows, seed=seed)
    rows_of = both.with_format("numpy")
    return {"train": rows_of["train"]["row"][:], "validation": rows_of["test"]["row"][:]}


def _require_readable(path: Path, builder: str, options: Mapping[str, Any]) -> None:
    if builder != "parquet":
        text_files.require(path)
    if builder == "csv":
        text_files.require_head(path, options.get("sep", ","))


def _refused(
    name: str, config: str | None, files: Mapping[str, list[Path]], error: BaseException
) -> UsageError:
    if row := skipped_rows.first(files):
        return UsageError(
            f"--data-path: {row.file}:{row.line}: {row.why}.",
            remedy=f"Correct the row, or skip malformed rows with {FLAG} N.",
        )
    if type(error).__name__ == "DatasetGenerationError":  # which says no more than that there was an error
        error = error.__cause__ or error
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    # what datasets 5 says of a part without rows: in a file, in a folder of save_to_disk
    if "corresponds to no data" in reason or isinstance(error, IndexError):
        if empty := _without_rows(files, reason):
            return empty
        reason = f"a split has no rows ({reason})"
    given = f"--data-path {name}{f' --data-name {config}' if config else ''}: {reason}"
    expected, remedy = _expected_instead(Path(name), config)
    return UsageError(f"{given.rstrip('.')}. It must be {expected}. {remedy}")


def _expected_instead(path: Path, config: str | None) -> tuple[str, str]:
    """Return a description of the expected input, and advice, for an error about unreadable data."""
    kinds = f"a file or a folder of {', '.join(_FORMATS)}"
    if path.is_dir() and config is not None:
        inside = (path / config).is_dir()
        return (
            "the name of a dataset on the hub, or a folder whose README.md lists its configurations",
            f"Pass only --data-path {path / config}."
            if inside
            else "For a folder of files, remove --data-name.",
        )
    if path.exists() or path.suffix in _FORMATS:
        return kinds, "Correct the file, or use another one."
    return (
        f"{kinds}, or a dataset on the hub",
        "Correct the name or the file. A dataset on the hub requires a connection, "
        "unless it is in the cache.",
    )


def _without_rows(files: Mapping[str, list[Path]], reason: str) -> UsageError | None:
    """Return an error for an empty split that ``datasets`` reports, or None if the split is unknown."""
    part = re.search(r'Instruction "(\w+)"', reason)
    paths = files.get(part.group(1), []) if part else []
    if not paths:
        return None
    have, where = ("has", "its head") if len(paths) == 1 else ("have", "their heads")
    below = f" below {where}" if paths[0].suffix in (".csv", ".tsv") else ""
    return UsageError(
        f"--data-path: {', '.join(map(str, paths))} {have} no rows{below}, but every file must have at "
        "least one row. Add rows, or remove the file."
    )


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"--task requires the datasets package, which cannot be imported ({error}). Install it: pip "
            "install 'megatron_npu[train]' (or pip install datasets)."
        ) from error
    return datasets
