"""Overlapping windows of a document (``--seq-length L --stride S``); each becomes a document."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Windows:
    """Windows of ``length`` tokens that start every ``stride`` tokens.

    The last window ends with the document and may overlap more, so no token is lost. A document with fewer
    than ``length`` tokens is one shorter window.
    """

    length: int
    stride: int

    def starts(self, tokens: int) -> list[int]:
        """Return the start positions of the windows of a document with the given number of tokens."""
        last = max(tokens - self.length, 0)
        return [*range(0, last, self.stride), last]

    def cut(self, tokens: bytes, itemsize: int) -> Iterator[bytes]:
        """Yield the windows of a document.

        Args:
            tokens: bytes of the document's tokens.
            itemsize: bytes per token.
        """
        for start in self.starts(len(tokens) // itemsize):
            yield tokens[start * itemsize : (start + self.length) * itemsize]


def named_by(arguments: argparse.Namespace) -> Windows | None:
    """Return the windows for the flags.

    Raises:
        UsageError: only one of the flags is given, windows would have gaps, or sentences are split too.
    """
    length, stride = arguments.seq_length, arguments.stride
    if length is None and stride is None:
        return None
    if length is None or stride is None:
        given, absent = ("--stride", "--seq-length") if length is None else ("--seq-length", "--stride")
        raise UsageError(
            f"{given} without {absent}",
            "both",
            "Pass both the length of a window and the distance between windows.",
        )
    if stride > length:
        raise UsageError(
            f"--stride {stride}",
            f"at most --seq-length {length}",
            "Lower it: a larger stride loses tokens. Windows without overlap have a stride of --seq-length.",
        )
    if arguments.split_sentences:
        raise UsageError(
            "--stride with --split-sentences",
            "only one of the two",
            "Remove one: windows would split sentences.",
        )
    return Windows(length, stride)
