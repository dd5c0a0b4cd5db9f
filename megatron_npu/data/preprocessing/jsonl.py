"""Read documents from JSON-lines files, plain or compressed, in batches of whole lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import compressed
from megatron_npu.data.preprocessing.compressed import decompressed, read

BATCH_BYTES = 256 * 1024
_BEGINS = 200  # bytes of a line that is left out which are told


class LineError(UsageError):
    """Raised when a line is malformed. Unlike its base class, it can be pickled by a worker process."""

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.given, self.expected, self.remedy)


@dataclass(frozen=True)
class Batch:
    """A batch of consecutive whole lines of one file.

    Attributes:
        path: the path of the file.
        first_line: the number of the first line, counted from 1.
        text: the lines as UTF-8.
        read: the number of bytes on disk that were read for this batch (the compressed size for a compressed
            file).
    """

    path: str
    first_line: int
    text: bytes
    read: int


def batches(path: str, size: int = BATCH_BYTES) -> Iterator[Batch]:
    """Yield the lines of a file in batches of about ``size`` bytes of text.

    A longer line is a separate batch.

    Raises:
        UsageError: the file cannot be read or decompressed.
    """
    line, rest, held, before = 1, [], 0, 0
    with given_files.opened(path) as raw, decompressed(path, raw) as stream:
        while block := read(stream, path, size):
            head, newline, tail = block.rpartition(b"\n")
            if not newline:
                rest.append(block)
                held += len(block)
                compressed.require_plausible(path, held)
                continue
            text = b"".join([*rest, head, newline])
            rest, held, position = [tail], len(tail), raw.tell()
            yield Batch(path, line, text, position - before)
            line, before = line + text.count(b"\n"), position
        if text := b"".join(rest):
            yield Batch(path, line, text, raw.tell() - before)


@dataclass(frozen=True)
class BadRow:
    """A skipped line, with its file, its number, the problem, and the beginning of its text."""

    file: str
    line: int
    why: str
    begins: str


def documents(
    batch: Batch, keys: Sequence[str], bad: list[BadRow] | None = None
) -> Iterator[list[list[str]]]:
    """Yield the sequences for each key of each line, as ``[keys][sequences]``.

    A text is one sequence.

    Args:
        batch: the lines.
        keys: the keys that contain text.
        bad: a list that receives malformed lines. If None, the first malformed line raises an error.

    Raises:
        LineError: a line is not UTF-8 or not JSON, lacks a key, or has no text under a key.
    """
    lines = batch.text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=batch.first_line):
        try:
            yield _sequences(line, keys)
        except _UnfitError as fault:
            if bad is not None:
                begins = line[:_BEGINS].decode("utf-8", "backslashreplace")
                bad.append(BadRow(batch.path, number, str(fault), begins))
                continue
            raise LineError(
                f"{batch.path}:{number}: {fault}. Each line must be a JSON object with text under "
                f"{', '.join(map(repr, keys))}. Correct the line, specify the keys with --json-keys, or "
                "skip such lines with --skip-bad-rows N; nothing was written."
            ) from fault


class _UnfitError(ValueError):
    """Raised when a line is malformed.

    The message describes the problem.
    """


def _sequences(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _UnfitError(f"byte {error.start} is not valid UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _UnfitError(
            f"the line is not valid JSON ({error})" if line.strip() else "the line is empty"
        ) from error
    if not isinstance(document, dict):
        raise _UnfitError(f"the line is JSON of type {type(document).__name__}, not an object")
    return [_texts(document, key) for key in keys]


def _texts(document: dict[str, object], key: str) -> list[str]:
    if key not in document:
        raise _UnfitError(
            f"the object has no key {key!r} (the object's keys are "
            f"{', '.join(map(repr, list(document)[:8])) or 'none'})"
        )
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
    """Reject a lone surrogate, which can be expressed in JSON but not in UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _UnfitError(
            f"the text under {key!r} contains the lone surrogate {text[error.start]!a}"
        ) from error
