"""Define sources of documents: the files and folders of ``--input``, or the rows of ``--hf-dataset``."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import jsonl, plain_text
from megatron_npu.data.preprocessing.compressed import plain_name

_TABLES = (".parquet", ".arrow", ".csv")  # the library `datasets` reads them, as it does for --hf-dataset
_TAKEN_FROM_FOLDERS = (".txt", ".json", ".jsonl", ".parquet", ".arrow")


class Corpus(Protocol):
    """A source of documents, which always yields JSON lines in the same order.

    Attributes:
        size: the size on disk in bytes, or None if it is unknown.
    """

    @property
    def size(self) -> int | None: ...

    def batches(self) -> Iterator[jsonl.Batch]: ...


@dataclass(frozen=True)
class Files:
    """The documents in JSON-lines files, plain-text files and tables.

    Attributes:
        paths: the paths of the files, in order.
        keys: the keys that contain text; the text of a plain-text file is stored under the first key.
    """

    paths: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def size(self) -> int:
        """The size of the files on disk in bytes."""
        return sum(Path(path).stat().st_size for path in self.paths)

    def batches(self) -> Iterator[jsonl.Batch]:
        """Yield the batches of all files, one file after another.

        Raises:
            UsageError: a file cannot be read, decompressed, or decoded as plain text.
        """
        for path in self.paths:
            if plain_text.is_plain_text(path):
                yield plain_text.batch(path, self.keys[0])
            elif Path(path).suffix in _TABLES:
                yield from _rows(path, None, "train", self.keys, "--input").batches()
            else:
                yield from jsonl.batches(path)


def named_by(arguments: argparse.Namespace, keys: Sequence[str]) -> Corpus:
    """Return the source of documents that the flags select.

    Raises:
        UsageError: both or neither of ``--input`` and ``--hf-dataset`` are given, or the input does not
            exist.
    """
    if (arguments.input is None) == (arguments.hf_dataset is None):
        word, link = ("neither", "nor") if arguments.input is None else ("both", "and")
        given = f"{word} --input {link} --hf-dataset"
        raise UsageError(
            f"{given} were given, but exactly one of the two is required. Pass "
            "either --input or --hf-dataset."
        )
    if arguments.hf_dataset is not None:
        return _rows(arguments.hf_dataset, arguments.hf_name, arguments.hf_split, keys, "--hf-dataset")
    files = Files(tuple(path for name in arguments.input for path in _paths(name)), tuple(keys))
    plain = next(filter(plain_text.is_plain_text, files.paths), None) if len(keys) > 1 else None
    if plain is not None:
        raise UsageError(
            f"--json-keys must be a single key for the plain-text file {plain}, because plain text has no "
            f"keys, but got {' '.join(keys)}. Pass one key, or only JSON-lines files."
        )
    return files


def _rows(name: str, config: str | None, split: str, keys: Sequence[str], flag: str) -> Corpus:
    from megatron_npu.data.preprocessing.hf_rows import Rows  # for it alone is `datasets` wanted

    return Rows.opened(name, config, split, keys, flag)


def _paths(name: str) -> list[str]:
    """Return the files that one argument of ``--input`` selects, such as a folder or a pattern.

    Raises:
        UsageError: the argument selects no file.
    """
    if Path(name).is_file():
        return [name]
    if Path(name).is_dir():
        return _below(Path(name))
    found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
    if not found:
        reason = "it is not a file" if Path(name).exists() else "there is no such file"
        raise UsageError(
            f"--input {name} must be a text file, or a folder of text files, but {reason}. Correct the path."
        )
    return found


def _below(folder: Path) -> list[str]:
    """Return the text files in a folder and its subfolders, sorted by name.

    Raises:
        UsageError: the folder contains no text file.
    """
    files = sorted(
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".")
    )
    taken = [file for file in files if Path(plain_name(file)).suffix in _TAKEN_FROM_FOLDERS]
    if not taken:
        raise UsageError(
            f"--input {folder} must contain text, but none of its {len(files)} files has the extension "
            f"{', '.join(_TAKEN_FROM_FOLDERS)}. Pass the files themselves, for example {folder}/*."
        )
    if others := len(files) - len(taken):
        print(f"--input {folder}: ignoring files of other types: {others}", file=sys.stderr)
    return taken
