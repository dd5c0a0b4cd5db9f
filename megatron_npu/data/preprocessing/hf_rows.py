"""Read documents from the rows of a Hugging Face dataset or of csv, json, parquet and arrow files.

The library `datasets` streams the rows: no file is downloaded as a whole, and nothing is cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.data import dataset_folders, hub
from megatron_npu.data.preprocessing.jsonl import BATCH_BYTES, Batch

# a cell that says NA or null is a text; an empty one is none
CSV = {"keep_default_na": False, "na_values": [""]}
# the ending of a file -> what `datasets` calls its format
_FORMATS = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}


@dataclass(frozen=True)
class Rows:
    """The rows of one split of a dataset.

    Attributes:
        rows: the rows from `datasets`, each a mapping of column to value.
        name: the name of the dataset and its split, used in messages.
        keys: the columns that contain text.
        flag: the flag that specifies the dataset, used in messages.
    """

    rows: Any
    name: str
    keys: tuple[str, ...]
    flag: str = "--hf-dataset"

    @property
    def size(self) -> None:
        """Return None, because the size of a stream is unknown."""
        return None

    @classmethod
    def opened(
        cls, name: str, config: str | None, split: str, keys: Sequence[str], flag: str = "--hf-dataset"
    ) -> Rows:
        """Open one split of a dataset.

        Args:
            name: a name on the hub, a file, a folder of files, or a folder written by ``save_to_disk``.
            config: the configuration to use if the dataset has several (``--hf-name``).
            split: the name of the split, for example ``train``.
            keys: the columns that contain text.
            flag: the flag that specifies the dataset, used in messages.

        Raises:
            UsageError: `datasets` is not installed, or cannot open the dataset.
        """
        datasets = _library(flag)
        try:
            rows = _load(datasets, name, config, split)
        except UsageError:
            raise
        except Exception as error:  # the library, and the libraries below it, raise of all kinds
            raise _refused(name, split, error, flag) from error
        shown = f"{name} ({split})" if flag == "--hf-dataset" else name
        return cls(rows, shown, tuple(keys), flag)

    def batches(self) -> Iterator[Batch]:
        """Yield the rows in batches. The first row is counted as line 1.

        Raises:
            UsageError: a row lacks a column, or cannot be fetched or read.
        """
        lines: list[str] = []
        length, first = 0, 1
        for number, row in enumerate(self._fetched(), start=1):
            lines.append(self._line(row, number))
            length += len(lines[-1])
            if length >= BATCH_BYTES:
                yield self._batch(lines, first)
                lines, length, first = [], 0, number + 1
        if lines:
            yield self._batch(lines, first)

    def _batch(self, lines: list[str], first: int) -> Batch:
        return Batch(self.name, first, "".join(lines).encode(), 0)

    def _fetched(self) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self.rows
        except Exception as error:  # as above; a closed generator's is none
            raise UsageError(
                f"{self.flag} {self.name}: the rows cannot be read: {_first_line(error)}. Check the file or "
                "the connection; nothing was written."
            ) from error

    def _line(self, row: Mapping[str, Any], number: int) -> str:
        missing = [key for key in self.keys if key not in row]
        if missing:
            raise UsageError(
                f"{self.flag} {self.name} has no column {missing[0]!r} (the columns are "
                f"{', '.join(map(repr, row))}), but the columns to read are "
                f"{', '.join(map(repr, self.keys))}. Specify the columns with --json-keys; nothing was "
                "written."
            )
        try:
            return json.dumps({key: row[key] for key in self.keys}) + "\n"
        except TypeError as error:  # a date, an image
            raise UsageError(
                f"{self.flag} {self.name}: row {number} must contain text: {error}. Choose other columns."
            ) from error


def _library(flag: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{flag} requires the package datasets, which cannot be imported ({error}). Install it: pip "
            "install 'megatron_npu[data]' (or pip install datasets)."
        ) from error
    return datasets


def _load(datasets: ModuleType, name: str, config: str | None, split: str) -> Any:
    path = Path(name)
    if path.is_file():
        kind = _FORMATS.get(path.suffix)
        if kind is None:
            raise ValueError(f"the file name must end in one of {', '.join(_FORMATS)}")
        options = CSV if kind == "csv" else {}
        return datasets.load_dataset(
            kind, data_files={split: str(path)}, split=split, streaming=True, **options
        )
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        dataset_folders.require_own_files(path, f"--hf-dataset {name}")
        saved = datasets.load_from_disk(str(path))
        return saved[split] if isinstance(saved, dict) else saved
    hub.use_cache_if_silent(path)
    with dataset_folders.own_files_alone(name, f"--hf-dataset {name}"):
        return datasets.load_dataset(name, config, split=split, streaming=True)


def _refused(name: str, split: str, error: Exception, flag: str) -> UsageError:
    given = f"{flag} {name}" + (f" --hf-split {split}" if flag == "--hf-dataset" else "")
    return UsageError(
        f"{given} cannot be read: {_first_line(error)}. It must be a dataset on the hub, or a local csv, "
        "json, parquet or arrow file, or a folder of such files. Correct the name or the split; a dataset "
        "on the hub requires a connection to it (or to HF_ENDPOINT)."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
