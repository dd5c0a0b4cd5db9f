"""Megatron's NullTokenizer, for text that consists of numbers."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_npu.base.errors import UsageError

_SHOWN = 60  # characters of a text in a message


class NullTokenizer:
    """Texts are numbers separated by spaces; the end-of-document token is the last id, or another one.

    Args:
        size: number of ids; ``vocab_size`` is one larger unless another end-of-document id is given.
        end: ``--null-tokenizer-eod-id``: the id that ends a document.

    Raises:
        UsageError: the id does not exist.
    """

    def __init__(self, size: int, end: int | None = None) -> None:
        self.vocab_size = size + 1
        self.eod = size if end is None else end
        self.unknown: int | None = None
        if self.eod > size:
            raise UsageError(
                f"--null-tokenizer-eod-id {end} with --vocab-size {size}",
                f"an id up to {size}",
                "Change one.",
            )

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text.

        Raises:
            UsageError: a word is not an id.
        """
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.vocab_size for word in words):
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise UsageError(
                f"the text {shown!r}",
                f"numbers from 0 to {self.vocab_size - 1}, because the NullTokenizer has no words",
                "Pass ids, for example 5 17 3.",
            )
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the numbers as text."""
        return " ".join(map(str, ids))
