"""Implement Megatron's NullTokenizer, for text that consists of numbers."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_npu.base import digits
from megatron_npu.base.errors import UsageError

_SHOWN = 60  # characters of a text in a message


class NullTokenizer:
    """Tokenizer for texts that consist of ids separated by spaces.

    Args:
        size: ``--vocab-size``, the number of ids without the default end-of-document id; ``vocab_size`` is
            one larger.
        end: ``--null-tokenizer-eod-id``, the end-of-document id. If None, it is the last id, ``size``.

    Raises:
        UsageError: ``end`` is greater than ``size``.
    """

    def __init__(self, size: int, end: int | None = None) -> None:
        self.vocab_size = size + 1
        self.eod = size if end is None else end
        self.unknown: int | None = None
        if self.eod > size:
            raise UsageError(
                f"--null-tokenizer-eod-id must be at most --vocab-size {size}, but got {end}. Change one of "
                "the two flags."
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids that a text contains.

        Raises:
            UsageError: a word is not an id.
        """
        words = text.split()
        ids = [digits.number(word) for word in words]
        if not all(number is not None and number < self.vocab_size for number in ids):
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise UsageError(
                f"the text must consist of numbers from 0 to {self.vocab_size - 1}, because the "
                f"NullTokenizer reads only ids, but got {shown!r}",
                remedy="Pass ids, for example 5 17 3.",
            )
        return [number for number in ids if number is not None]

    def decode(self, ids: Iterable[int]) -> str:
        """Return ids as text, separated by spaces."""
        return " ".join(map(str, ids))
