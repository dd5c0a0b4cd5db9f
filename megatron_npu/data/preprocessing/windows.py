"""Split documents into overlapping windows (``--seq-length L --stride S``), each of which becomes a
document.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Windows:
    """The settings for windows of ``length`` tokens that start every ``stride`` tokens.

    The last window ends at the end of the document and may overlap more than the others, so that no token is
    lost. A document with fewer than ``length`` tokens becomes one shorter window.
    """

    length: int
    stride: int

    def starts(self, tokens: int) -> list[int]:
        """Return the positions at which the windows of a document with the given number of tokens start."""
        last = max(tokens - self.length, 0)
        return [*range(0, last, self.stride), last]

    def cut(self, tokens: bytes, itemsize: int) -> Iterator[bytes]:
        """Yield the windows of a document, given the bytes of its tokens.

        Args:
            tokens: the bytes of the document's tokens.
            itemsize: the number of bytes per token.
        """
        for start in self.starts(len(tokens) // itemsize):
            yield tokens[start * itemsize : (start + self.length) * itemsize]


def named_by(arguments: argparse.Namespace) -> Windows | None:
    """Return the windows that the flags specify.

    Raises:
        UsageError: only one of the flags is given, windows would have gaps, or sentences are split too.
    """
    length, stride = arguments.seq_length, arguments.stride
    if length is None and stride is None:
        return None
    if length is None or stride is None:
        given, absent = ("--stride", "--seq-length") if length is None else ("--seq-length", "--stride")
        raise UsageError(
            f"{given} requires {absent}. Pass both the length of a window and the distance between windows."
        )
    if stride > length:
        raise UsageError(
            f"--stride must be at most --seq-length {length}, but got {stride}. Lower the stride, "
            "because a stride larger than a window loses tokens. For windows without overlap, "
            "pass the same value to both."
        )
    if arguments.split_sentences:
        raise UsageError(
            "--stride and --split-sentences are mutually exclusive, because windows would split sentences. "
            "Remove one."
        )
    return Windows(length, stride)
