"""Reading documents: files of JSON lines, plain or compressed, in batches of whole lines."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from megatron_npu.errors import UsageError

BATCH_BYTES = 256 * 1024


class LineError(UsageError):
    """A line that is not a document. Unlike its base class it can be pickled, by a worker process."""

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.given, self.expected, self.remedy)


@dataclass(frozen=True)
class Batch:
    """Consecutive whole lines of one file.

    Attributes:
        path: the file.
        first_line: number of the first line, counted from 1.
        text: the lines as UTF-8.
        read: bytes of the file on disk that were read for this batch (compressed ones where it is).
    """

    path: str
    first_line: int
    text: bytes
    read: int


def check(paths: Sequence[str]) -> int:
    """Return the size on disk of all files together, in bytes.

    Raises:
        UsageError: one is missing or is not a file.
    """
    for path in paths:
        if not Path(path).is_file():
            found = "not a file" if Path(path).exists() else "no such file"
            raise UsageError(f"--input {path}: {found}", "a file of JSON lines", "Correct the path.")
    return sum(Path(path).stat().st_size for path in paths)


def batches(path: str, size: int = BATCH_BYTES) -> Iterator[Batch]:
    """Yield a file in batches of about ``size`` bytes of text; a longer line is a batch of its own.

    Raises:
        UsageError: the file cannot be read or decompressed.
    """
    line, rest, before = 1, [], 0
    with open(path, "rb") as raw, _decompressed(path, raw) as stream:
        while block := _read(stream, path, size):
            head, newline, tail = block.rpartition(b"\n")
            if not newline:
                rest.append(block)
                continue
            text = b"".join([*rest, head, newline])
            rest, position = [tail], raw.tell()
            yield Batch(path, line, text, position - before)
            line, before = line + text.count(b"\n"), position
        if text := b"".join(rest):
            yield Batch(path, line, text, raw.tell() - before)


def documents(batch: Batch, keys: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield, line by line, the sequences of each key: ``[keys][sequences]``; a text is one sequence.

    Raises:
        LineError: a line is not UTF-8 or not JSON, lacks a key, or holds something else than text there.
    """
    lines = batch.text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=batch.first_line):
        try:
            yield _sequences(line, keys)
        except _UnfitError as fault:
            raise LineError(
                f"{batch.path}:{number}: {fault}",
                f"one JSON object a line with text under {', '.join(map(repr, keys))}",
                "Correct the line, or name the keys with --json-keys; nothing was written.",
            ) from fault


class _UnfitError(ValueError):
    """What is wrong with a line."""


def _sequences(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _UnfitError(f"byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _UnfitError(f"broken JSON ({error})" if line.strip() else "an empty line") from error
    if not isinstance(document, dict):
        raise _UnfitError(f"JSON of type {type(document).__name__}")
    return [_texts(document, key) for key in keys]


def _texts(document: dict[str, object], key: str) -> list[str]:
    if key not in document:
        raise _UnfitError(f"no key {key!r} (it has {', '.join(map(repr, list(document)[:8])) or 'none'})")
    value = document[key]
    texts: list[str] = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            raise _UnfitError(f"{key!r} holds {type(text).__name__}")
        if not text.isascii():
            _refuse_surrogates(text, key)
        texts.append(text)
    return texts


def _refuse_surrogates(text: str, key: str) -> None:
    """JSON can write half of a surrogate pair, which no UTF-8 can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _UnfitError(f"{key!r} holds the lone surrogate {text[error.start]!a}") from error


def _read(stream: BinaryIO | io.BufferedIOBase, path: str, size: int) -> bytes:
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    if (zstd := _zstd()) is not None:
        damage = (*damage, zstd.ZstdError)
    try:
        return stream.read(size)
    except damage as error:
        raise UsageError(
            f"--input {path}: {error}", "an undamaged file", "Fetch or compress the file again."
        ) from error


def _decompressed(path: str, raw: BinaryIO) -> BinaryIO | io.BufferedIOBase:
    """Return the stream of the text; the ending of the name says how it is compressed."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".bz2":
        return bz2.BZ2File(raw)
    if suffix == ".zst":
        if (zstd := _zstd()) is None:
            raise UsageError(
                f"--input {path}",
                "the package backports.zstd for .zst files",
                "Install it: pip install backports.zstd.",
            )
        return zstd.ZstdFile(raw)
    return raw


@cache
def _zstd() -> ModuleType | None:
    """Return the module for .zst: the standard library's from Python 3.14 on, before that its backport.

    The package ``zstandard`` would not do: it takes a truncated file for a whole one.
    """
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
