"""Overlapping windows of a document (``--seq-length L --stride S``), each of which becomes a document."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Windows:
    """Windows of ``length`` tokens that begin every ``stride`` tokens.

    The last window ends with the document, so it may overlap more; no token is lost. A document of fewer
    tokens than ``length`` is one shorter window.
    """

    length: int
    stride: int

    def starts(self, tokens: int) -> list[int]:
        """Return where the windows of a document of so many tokens begin."""
        last = max(tokens - self.length, 0)
        return [*range(0, last, self.stride), last]

    def cut(self, tokens: bytes, itemsize: int) -> Iterator[bytes]:
        """Yield the windows of a document.

        Args:
            tokens: its tokens' bytes.
            itemsize: bytes of a token.
        """
        for start in self.starts(len(tokens) // itemsize):
            yield tokens[start * itemsize : (start + self.length) * itemsize]


def named_by(arguments: argparse.Namespace) -> Windows | None:
    """Return the windows that the flags name.

    Raises:
        UsageError: one flag without the other, gaps between the windows, or together with sentences.
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
