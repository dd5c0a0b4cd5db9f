"""Define the tokenizer interface that this package's commands use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """Interface of the tokenizers, which convert text to ids and back.

    Attributes:
        vocab_size: the number of ids.
        eod: the id that ends a text.
        unknown: the id of the unknown token; None if there is none, or if it is ``eod``.
    """

    vocab_size: int
    eod: int
    unknown: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...
