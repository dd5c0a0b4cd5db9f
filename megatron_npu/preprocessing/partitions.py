"""Megatron's order of documents with ``--partitions N``: dealt in turn to N parts, which are then joined."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron_npu.preprocessing.indexed_dataset import Writer

_BLOCK = 16 << 20  # bytes that are copied at a time


class _Part:
    """The documents of one part. Their tokens lie in a file without a name, which nothing leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.tokens = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the dealer closes it
        self._lengths, self._sequences = array("i"), array("q")

    def add(self, tokens: bytes, lengths: np.ndarray, sequences: np.ndarray) -> None:
        self.tokens.write(tokens)
        self._lengths.frombytes(lengths.astype(np.int32, copy=False).tobytes())
        self._sequences.frombytes(sequences.astype(np.int64, copy=False).tobytes())

    def move_to(self, writer: Writer) -> None:
        self.tokens.seek(0)
        lengths = np.frombuffer(self._lengths, np.int32)
        writer.add(b"", lengths, np.frombuffer(self._sequences, np.int64))
        while block := self.tokens.read(_BLOCK):
            writer.add(block, lengths[:0], lengths[:0])


class Dealer:
    """Takes the place of a writer: ``finish`` gives it all documents of the first part, then of the second, …

    Args:
        writer: of the dataset; the parts take as much room again, beside it.
        parts: how many; document ``i`` falls to part ``i % parts``.
    """

    def __init__(self, writer: Writer, parts: int) -> None:
        self._writer, self._documents = writer, 0
        self._parts = [_Part(Path(writer.prefix).parent) for _ in range(parts)]

    def __enter__(self) -> Dealer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in self._parts:
            part.tokens.close()

    def add(self, tokens: bytes, lengths: np.ndarray, sequences: np.ndarray) -> None:
        """Deal documents; the arguments are those of ``Writer.add``."""
        for part, its in zip(self._parts, self._dealt(tokens, lengths, sequences), strict=True):
            part.add(*its)
        self._documents += len(sequences)

    def _dealt(
        self, tokens: bytes, lengths: np.ndarray, sequences: np.ndarray
    ) -> Iterator[tuple[bytes, np.ndarray, np.ndarray]]:
        of_document = (self._documents + np.arange(len(sequences))) % len(self._parts)
        of_sequence = np.repeat(of_document, sequences)
        of_token = np.repeat(of_sequence, lengths)
        ids = np.frombuffer(tokens, self._writer.dtype)
        for part in range(len(self._parts)):
            mine = of_token == part
            yield ids[mine].tobytes(), lengths[of_sequence == part], sequences[of_document == part]

    def finish(self) -> None:
        """Give everything to the writer, and finish that."""
        for part in self._parts:
            part.move_to(self._writer)
        self._writer.finish()
