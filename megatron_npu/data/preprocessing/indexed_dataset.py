"""Write and check Megatron's indexed datasets, ``<prefix>.bin`` and ``<prefix>.idx``.

The ``.bin`` file contains only the tokens of all sequences. The ``.idx`` file is little-endian and contains:

====================  =====================================================================
9 bytes               ``MMIDIDX`` and two zeros
uint64                version, 1
uint8                 code of the token type, see ``CODES``
uint64                S, the number of sequences
uint64                D, the number of document boundaries: documents + 1
int32 [S]             number of tokens in each sequence
int64 [S]             offset of each sequence in the ``.bin``, in bytes
int64 [D]             first sequence of each document, then S; an empty document repeats the index
====================  =====================================================================

The format is that of ``megatron/core/datasets/indexed_dataset.py``, unchanged from core 0.12 to 0.16.
"""

from __future__ import annotations

import contextlib
import glob
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import dataset_sums
from megatron_npu.safe_files import lazy_index

MAGIC, HEADER, VERSION = lazy_index.MAPPED_MAGIC, lazy_index.MAPPED_HEADER, lazy_index.VERSION
CODES = lazy_index.CODES

_CHUNK = 1 << 20  # elements that are handled at a time
_SAMPLE_BYTES = 256 << 20  # up to here every token is read, beyond it this many bytes
_SAMPLE_BLOCKS = 256
_REMEDY = "Create the dataset again with `megatron-npu preprocess`."


def token_type(vocab_size: int) -> np.dtype:
    """Return Megatron's dtype for the tokens of a vocabulary: uint16 below 65500 entries, otherwise int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class Writer:
    """Writes one dataset to files with temporary names.

    ``publish`` renames one or more datasets to their final names.

    The files are bitwise identical to those of megatron-core's ``IndexedDatasetBuilder``. That class is not
    used because it requires torch, and because it writes to the final names, so that a killed run leaves
    files that look like a dataset.

    Leaving the ``with`` block without publishing removes the files; files of a killed process are removed by
    the next process that uses the same prefix.

    Args:
        prefix: the path of the dataset without ``.bin`` and ``.idx``.
        dtype: the dtype of the tokens.
        lazy: whether to write the index in Megatron's ``lazy`` and ``cached`` format; see
            ``safe_files.lazy_index``.
    """

    def __init__(self, prefix: str, dtype: np.dtype, *, lazy: bool = False) -> None:
        self.prefix, self.dtype, self._lazy = prefix, dtype, lazy
        self.tokens = 0
        names = {end: Path(f"{prefix}.{end}") for end in ("bin", "idx")}
        for name in names.values():
            files.remove_abandoned(name)
        self._partial_files = {end: files.partial_file(name) for end, name in names.items()}
        self._sequence_lengths = array("i")
        self._sequences_of_documents = array("q")
        self._sums = {"bin": dataset_sums.Summer(), "idx": dataset_sums.Summer()}
        self._bin = _create(self._partial_files["bin"])

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in self._partial_files.values():
            part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is still to be written need not find room any more
            self._bin.close()

    def add(self, tokens: bytes, lengths: np.ndarray, sequences: np.ndarray) -> None:
        """Append documents to the dataset.

        Args:
            tokens: the bytes of the tokens.
            lengths: [sequences] int32, the number of tokens in each sequence.
            sequences: [documents] int64, the number of sequences in each document.
        """
        self._bin.write(tokens)
        self._sums["bin"].add(tokens)
        self._sequence_lengths.frombytes(lengths.astype(np.int32, copy=False).tobytes())
        self._sequences_of_documents.frombytes(sequences.astype(np.int64, copy=False).tobytes())
        self.tokens += len(tokens) // self.dtype.itemsize

    def count_shorter(self, length: int) -> int:
        """Return the number of sequences with fewer than ``length`` tokens."""
        return int(np.count_nonzero(np.frombuffer(self._sequence_lengths, dtype=np.int32) < length))

    def finish(self) -> None:
        """Write the index under its temporary name, and flush both files to disk."""
        files.sync(self._bin)
        self._bin.close()
        with _create(self._partial_files["idx"]) as stream:
            for piece in self._index():
                stream.write(piece)
                self._sums["idx"].add(piece)
            files.sync(stream)

    def _index(self) -> Iterator[bytes]:
        lengths = np.frombuffer(self._sequence_lengths, dtype=np.int32)
        counts = np.frombuffer(self._sequences_of_documents, dtype=np.int64)
        code = next(code for code, name in CODES.items() if name == self.dtype.name)
        if self._lazy:
            yield from lazy_index.pieces(lengths, counts, code, self.dtype.itemsize)
            return
        yield HEADER.pack(MAGIC, VERSION, code, len(lengths), len(counts) + 1)
        yield lengths.astype("<i4").tobytes()
        for pointers in _sequence_pointers(lengths, self.dtype.itemsize):
            yield pointers.astype("<i8").tobytes()
        yield bytes(8)
        yield np.cumsum(counts).astype("<i8").tobytes()


def publish(writers: Sequence[Writer]) -> None:
    """Rename all finished datasets to their final names, or rename none of them.

    The ``.idx`` files are renamed last.

    The checksums are written after all renames; a dataset without checksums is not verified.

    An older dataset of the same name is replaced, and is never mixed with the new one. If a rename fails,
    files that were already renamed are removed, and the older dataset is lost.
    """
    touched: list[Path] = []
    try:
        for writer in writers:
            data, index = Path(f"{writer.prefix}.bin"), Path(f"{writer.prefix}.idx")
            sums = dataset_sums.path_of(writer.prefix)
            touched += [sums, index, data]
            sums.unlink(missing_ok=True)
            index.unlink(missing_ok=True)
            os.replace(writer._partial_files["bin"], data)
            os.replace(writer._partial_files["idx"], index)
            dataset_sums.write(writer.prefix, {name: summer.sums() for name, summer in writer._sums.items()})
            files.sync_directory(index.parent)
    except BaseException:
        for path in touched:
            path.unlink(missing_ok=True)
        raise


def _create(path: Path) -> BinaryIO:
    stream = files.created(path, 0o640, 1 << 20)
    files.claim(stream)
    return stream


def _sequence_pointers(lengths: np.ndarray, itemsize: int) -> Iterator[np.ndarray]:
    """Yield the byte offset of each sequence, [S] int64, in chunks."""
    total = 0
    for at in range(0, len(lengths), _CHUNK):
        ends = total + np.cumsum(lengths[at : at + _CHUNK], dtype=np.int64) * itemsize
        yield ends - lengths[at : at + _CHUNK].astype(np.int64) * itemsize
        total = int(ends[-1])


@dataclass(frozen=True)
class DatasetSummary:
    """A summary of a dataset that has been checked.

    Attributes:
        dtype: the dtype of the tokens.
        sequences, documents, tokens: the numbers of sequences, documents and tokens.
        largest_token: the largest id that was found.
        sampled: whether ``largest_token`` is from a sample of the tokens.
    """

    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int
    largest_token: int
    sampled: bool


def validate(prefix: str | Path, vocab_size: int | None = None) -> DatasetSummary:
    """Check a dataset before it is used. The index is read completely.

    The ids are compared with the vocabulary. If the ``.bin`` file has up to 256 MiB, all ids are checked;
    otherwise, the ids in 256 evenly spaced blocks of 256 MiB in total are checked.

    Args:
        prefix: the path of the dataset without ``.bin`` and ``.idx``.
        vocab_size: the number of ids of the tokenizer. If None, the ids are not checked.

    Raises:
        UsageError: a file is missing, truncated, of another type, or inconsistent with the other file or the
            checksums; there are no tokens; or an id is outside the vocabulary.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise UsageError(
                f"{path} does not exist, but a dataset consists of a .bin and an .idx file in the same "
                "folder",
                remedy=_advice(Path(prefix)),
            )
    with lazy_index.mapped(index) as opened:
        dtype, sequences, boundaries = _read_header(Path(opened))
        tokens = _check_index(Path(opened), dtype, sequences, boundaries)
    _require(data, data.stat().st_size, tokens * dtype.itemsize, "bytes, the size given by its .idx file")
    if not tokens:
        raise UsageError(
            f"{data} contains no tokens, but at least one is required. Preprocess files that contain text."
        )
    dataset_sums.require(prefix)
    largest, sampled = _check_tokens(data, dtype, vocab_size)
    return DatasetSummary(dtype, sequences, boundaries - 1, tokens, largest, sampled)


def _advice(prefix: Path) -> str:
    """Return the advice for a dataset without files, which names the dataset that was meant, if there is one.

    This is the one whose file was passed, or one that ``preprocess --output-prefix`` named after the prefix.
    """
    stem = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
    named = sorted(stem.parent.glob(f"{glob.escape(stem.name)}_*.idx"))
    for index in (Path(f"{stem}.idx"), *named):
        if index.is_file() and index != Path(f"{prefix}.idx"):
            return f"Did you mean {index.with_suffix('')}?"
    return "Pass the path without its extension, or create the dataset with `megatron-npu preprocess`."


def sequence_lengths(prefix: str | Path) -> np.ndarray:
    """Return the length of each sequence of a valid dataset, [S] int32, memory-mapped from its index."""
    with lazy_index.mapped(f"{prefix}.idx") as path:
        _, sequences, _ = _read_header(Path(path))
        return np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=(sequences,))


def document_boundaries(prefix: str | Path) -> np.ndarray:
    """Return the first sequence of each document of a valid dataset, with the number of sequences as the
    last entry.
    """
    with lazy_index.mapped(f"{prefix}.idx") as path:
        _, sequences, boundaries = _read_header(Path(path))
        at = HEADER.size + 12 * sequences
        return np.memmap(path, dtype="<i8", mode="r", offset=at, shape=(boundaries,))


def _require(path: Path, found: int, expected: int, what: str) -> None:
    if found != expected:
        state = ", so it seems truncated" if found < expected else ""
        raise UsageError(f"{path} has {found} bytes{state}; it must have {expected} {what}. {_REMEDY}")


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Return the token dtype and the numbers of sequences and documents, after checking the size of the
    index file.
    """
    with open(path, "rb") as stream:
        head = stream.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise UsageError(
            f"{path} is not an indexed dataset: it must begin with {MAGIC!r}, but it begins with "
            f"{head[:9]!r}. {_REMEDY}"
        )
    if len(head) < HEADER.size:
        _require(path, len(head), HEADER.size, "bytes, the size of the header")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise UsageError(f"{path} has version {version}, but only version {VERSION} is supported. {_REMEDY}")
    if code not in CODES:
        raise UsageError(
            f"{path} has the unknown token type {code}; it must be an integer type, one of {sorted(CODES)}. "
            f"{_REMEDY}"
        )
    size = HEADER.size + 12 * sequences + 8 * boundaries
    _require(path, path.stat().st_size, size, f"bytes for its {sequences} sequences")
    return np.dtype(CODES[code]).newbyteorder("<"), sequences, boundaries


def _check_index(path: Path, dtype: np.dtype, sequences: int, boundaries: int) -> int:
    """Check the sequence lengths, offsets and document boundaries, and return the number of tokens."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    at = HEADER.size
    lengths = raw[at : at + 4 * sequences].view("<i4")
    pointers = raw[at + 4 * sequences : at + 12 * sequences].view("<i8")
    documents = raw[at + 12 * sequences :].view("<i8")
    if sequences and lengths.min() < 0:
        raise UsageError(
            f"{path}: the length of a sequence must be at least 0, but it is {lengths.min()}. {_REMEDY}"
        )
    done = 0
    for expected in _sequence_pointers(lengths, dtype.itemsize):
        if not np.array_equal(pointers[done : done + len(expected)], expected):
            raise UsageError(
                f"{path} has invalid sequence offsets; they must be the cumulative sums of the lengths. "
                f"{_REMEDY}"
            )
        done += len(expected)
    ordered = boundaries and documents[0] == 0 and documents[-1] == sequences and _ascends(documents)
    if not ordered:
        raise UsageError(
            f"{path} has invalid document boundaries; they must be ascending numbers from 0 to {sequences}. "
            f"{_REMEDY}"
        )
    return int(lengths.sum(dtype=np.int64))


def _ascends(values: np.ndarray) -> bool:
    pieces = (values[at : at + _CHUNK + 1] for at in range(0, len(values), _CHUNK))
    return all(bool(np.all(piece[1:] >= piece[:-1])) for piece in pieces)


def _check_tokens(path: Path, dtype: np.dtype, vocab_size: int | None) -> tuple[int, bool]:
    """Return the largest token id that was found, and whether only a sample of the tokens was checked."""
    tokens = np.memmap(path, dtype=dtype, mode="r")
    blocks, sampled = _blocks(tokens)
    smallest, largest = 0, 0
    for block in blocks:
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        raise UsageError(
            f"{path} contains the token id {smallest if smallest < 0 else largest}, but ids must be "
            + (f"from 0 to {vocab_size - 1}, the last id of the vocabulary" if vocab_size else "at least 0")
            + ". Pass the --vocab-file and --merge-file of the dataset, or preprocess it again."
        )
    return largest, sampled


def _blocks(tokens: np.ndarray) -> tuple[Iterator[np.ndarray], bool]:
    """Return blocks of tokens, which are all tokens or an evenly spaced sample, and whether they are a
    sample.
    """
    if tokens.nbytes <= _SAMPLE_BYTES:
        return (tokens[at : at + _CHUNK] for at in range(0, len(tokens), _CHUNK)), False
    size = _SAMPLE_BYTES // _SAMPLE_BLOCKS // tokens.itemsize
    starts = np.linspace(0, len(tokens) - size, _SAMPLE_BLOCKS).astype(np.int64)
    return (tokens[at : at + size] for at in starts), True
