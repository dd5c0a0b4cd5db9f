"""Convert the index files of Megatron-LM's ``--dataset-impl lazy`` and ``cached`` to the current format.

Megatron-LM supported both from 2019 to 2023. Both use one format and differ in how upstream reads it. The
``.bin`` file is that of ``mmap``: the tokens of all sequences. The ``.idx`` file is little-endian
(``megatron/data/indexed_dataset.py`` of 285068c8):

====================  =====================================================================
8 bytes               ``TNTIDX`` and two zeros
uint64                version, 1
uint64, uint64        code of the token type; its bytes
uint64, uint64        S, the number of sequences; the number of sizes, S too
uint64                D, the number of document boundaries: documents + 1
int64 [S + 1]         number of the first size of each sequence, and S: 0, 1, ... S
int64 [S + 1]         where each sequence begins in the ``.bin``, in tokens, and where the last one ends
int64 [S]             tokens of each sequence
int64 [D]             first sequence of each document, and S
====================  =====================================================================
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError

MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<8sQQQQQQ")
MAPPED_MAGIC = b"MMIDIDX\x00\x00"  # of today's, ``mmap``
MAPPED_HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # of token types
_REMEDY = "Create the dataset again with `megatron-npu preprocess`."
_LONGEST = np.iinfo(np.int32).max  # tokens of a sequence that today's index can tell


def is_lazy(index: str | Path) -> bool:
    """Return True if a file is a ``lazy`` or ``cached`` index."""
    try:
        with files.regular(index) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:  # its reader says what is wrong; an address is no file
        return False


def pieces(lengths: np.ndarray, sequences: np.ndarray, code: int, itemsize: int) -> Iterator[bytes]:
    """Yield the bytes of a ``lazy`` index, piece by piece.

    Args:
        lengths: [S], the number of tokens of each sequence.
        sequences: [documents], the number of sequences of each document.
        code, itemsize: the code and size of the token type.
    """
    count = len(lengths)
    yield HEADER.pack(MAGIC, VERSION, code, itemsize, count, count, len(sequences) + 1)
    yield np.arange(count + 1, dtype="<i8").tobytes()
    yield bytes(8)
    yield np.cumsum(lengths, dtype="<i8").tobytes()
    yield lengths.astype("<i8").tobytes()
    yield bytes(8)
    yield np.cumsum(sequences, dtype="<i8").tobytes()


@contextlib.contextmanager
def mapped(index: str | Path) -> Iterator[str | Path]:
    """Yield the path of an index in the current format.

    The path is the file itself or a temporary conversion.

    Memory maps of a temporary file remain valid after its removal.

    Raises:
        UsageError: a ``lazy`` or ``cached`` index is damaged, or cannot be converted to the current format.
    """
    if not is_lazy(index):
        yield index
        return
    content = _as_mapped(Path(index))
    with tempfile.NamedTemporaryFile(prefix="megatron-npu-", suffix=".idx") as stream:
        stream.write(content)
        stream.flush()
        yield stream.name


def _as_mapped(path: Path) -> bytes:
    """Return the bytes of the equivalent index in the current format."""
    raw = path.read_bytes()
    if len(raw) < HEADER.size:
        raise UsageError(
            f"{path} has {len(raw)} bytes, but its header alone has {HEADER.size}, so it seems truncated",
            remedy=_REMEDY,
        )
    _, version, code, itemsize, sequences, sizes, boundaries = HEADER.unpack_from(raw)
    if code not in CODES:
        raise UsageError(
            f"{path} has the unknown token type {code}; the type must be an integer type, one of "
            f"{sorted(CODES)}",
            remedy=_REMEDY,
        )
    if version != VERSION or sizes != sequences:
        raise UsageError(
            f"{path} must have version {VERSION} and one size per sequence, but has version {version} and "
            f"{sizes} sizes for {sequences} sequences",
            remedy=_REMEDY,
        )
    expected = HEADER.size + 8 * (3 * sequences + 2 + boundaries)
    if len(raw) != expected:
        state = ", so it seems truncated" if len(raw) < expected else ""
        raise UsageError(
            f"{path} must have {expected} bytes for its {sequences} sequences, but has {len(raw)}{state}",
            remedy=_REMEDY,
        )
    numbers = np.frombuffer(raw, "<i8", offset=HEADER.size)
    first, begins, lengths, documents = np.split(
        numbers, [sequences + 1, 2 * sequences + 2, 3 * sequences + 2]
    )
    _check(path, first, begins, lengths, documents)
    return b"".join(
        (
            MAPPED_HEADER.pack(MAPPED_MAGIC, VERSION, code, sequences, boundaries),
            lengths.astype("<i4").tobytes(),
            (begins[:-1] * itemsize).astype("<i8").tobytes(),
            documents.astype("<i8").tobytes(),
        )
    )


def _check(
    path: Path, first: np.ndarray, begins: np.ndarray, lengths: np.ndarray, documents: np.ndarray
) -> None:
    """Check that the parts of an index are consistent with each other."""
    sequences = len(lengths)
    if not np.array_equal(first, np.arange(sequences + 1)):
        raise UsageError(
            f"the sequences in {path} must be one-dimensional lists of tokens, but are not", remedy=_REMEDY
        )
    if sequences and not 0 <= lengths.min() <= lengths.max() <= _LONGEST:
        raise UsageError(
            f"{path} contains invalid sequence lengths; each must be from 0 to {_LONGEST} tokens",
            remedy=_REMEDY,
        )
    if begins[0] != 0 or not np.array_equal(np.diff(begins), lengths):
        raise UsageError(
            f"{path} contains invalid sequence offsets; they must be the cumulative sums of the lengths",
            remedy=_REMEDY,
        )
    ends = len(documents) and documents[0] == 0 and documents[-1] == sequences
    if not ends or np.any(np.diff(documents) < 0):
        raise UsageError(
            f"{path} contains invalid document boundaries; they must be ascending numbers from 0 to "
            f"{sequences}",
            remedy=_REMEDY,
        )
