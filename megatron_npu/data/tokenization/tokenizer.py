"""What our commands ask of a tokenizer, whichever one it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: number of ids.
        eod: the id that ends a text.
    """

    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...
