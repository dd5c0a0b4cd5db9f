"""A tokenizer of Hugging Face from its ``tokenizer.json``, through the ``tokenizers`` library alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_npu.errors import UsageError


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, which holds all of a tokenizer; transformers is not needed.

    Args:
        folder: with ``tokenizer.json``, and with ``tokenizer_config.json``, which names the end of a text.

    Raises:
        UsageError: a file is missing or broken, or no end of a text is named.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(
                f"--tokenizer-model {folder}: no tokenizer.json", "a folder that has one", "Correct the path."
            )
        try:
            self._model = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(
                f"{path}: {error}", "a tokenizer of Hugging Face", "Get a fresh copy."
            ) from error
        self.vocab_size: int = self._model.get_vocab_size(with_added_tokens=True)
        end = _end_of_text(Path(folder))
        eod = None if end is None else self._model.token_to_id(end)
        if eod is None:
            raise UsageError(
                f"{folder}: tokenizer_config.json names {end!r} as eos_token",
                "a token of tokenizer.json",
                "Name the token that ends a text there.",
            )
        self.eod: int = eod

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any.
            special_tokens: with those that the tokenizer puts around every text (``<s>``).
        """
        return self._model.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, without special tokens."""
        return self._model.decode(list(ids))


def _end_of_text(folder: Path) -> str | None:
    """Return the ``eos_token`` of a folder's ``tokenizer_config.json``; None if it names none."""
    try:
        values: Any = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        token = values.get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token
