"""Read a Hugging Face tokenizer from its ``tokenizer.json``, using only the ``tokenizers`` library."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import unicode_text

FILE = "tokenizer.json"
# Where the special tokens are named, the most telling file first.
CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_LONGEST_REPLACEMENT = 1000  # characters


class HuggingFaceTokenizer:
    """A tokenizer that is completely defined by a file ``tokenizer.json``.

    Transformers is not needed.

    Args:
        folder: a folder with ``tokenizer.json``, and with ``tokenizer_config.json`` or
            ``special_tokens_map.json`` for the end-of-text token.

    Raises:
        UsageError: a file is missing or invalid, or there is no end-of-text token.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / FILE
        if not path.is_file():
            raise UsageError(f"--tokenizer-model {folder} contains no tokenizer.json. Correct the path.")
        self._model = _read(path)
        self.vocabulary: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        # not their number: ids may have holes
        self.vocab_size: int = max(self.vocabulary.values(), default=-1) + 1
        end = special_token(Path(folder), "eos_token")
        eod = None if end is None else self._model.token_to_id(end)
        if eod is None:
            raise UsageError(
                f"{folder}: tokenizer_config.json sets eos_token to {end!r}, which is not a token "
                "in tokenizer.json. Set eos_token in this file to the end-of-text token."
            )
        self.eod: int = eod
        self.unknown: int | None = self._unknown(Path(folder))
        self._before = self._put_before_every_text()

    def _put_before_every_text(self) -> list[int]:
        """Return the special tokens that the tokenizer adds at the beginning of every text."""
        encoded = self._model.encode("a")
        marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return [token for token, _ in itertools.takewhile(lambda pair: pair[1], marked)]

    def _unknown(self, folder: Path) -> int | None:
        token = getattr(self._model.model, "unk_token", None) or special_token(folder, "unk_token")
        found = self._model.token_to_id(token) if token else None
        return None if found == self.eod else found

    @property
    def added_tokens(self) -> list[str]:
        """The added tokens, including special tokens, ordered by id."""
        added = self._model.get_added_tokens_decoder()
        return [added[token].content for token in sorted(added)]

    def token(self, token: int) -> str | None:
        """Return the text of a token, or None if there is no token with this id."""
        return self._model.id_to_token(token)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        added = self._model.get_added_tokens_decoder()
        return frozenset(token for token, content in added.items() if content.special)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any text.
            special_tokens: whether to include the tokens that the tokenizer adds to every text (``<s>``).

        Raises:
            UsageError: the text cannot be encoded as UTF-8.
        """
        try:
            return self._model.encode(text, add_special_tokens=special_tokens).ids
        except TypeError:
            unicode_text.require(text)
            raise

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text that includes special tokens.

        The tokens that ``encode`` adds at the beginning of every text are removed once.
        """
        return self._model.decode(self.without_beginning(list(ids)), skip_special_tokens=False)

    def without_beginning(self, ids: list[int]) -> list[int]:
        """Return the ids without the special tokens that ``encode`` adds at the beginning of every text."""
        length = len(self._before)
        return ids[length:] if ids[:length] == self._before else ids


def _read(path: Path) -> Tokenizer:
    try:
        model = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(
            f"{path} is not a valid Hugging Face tokenizer: {error}. Get a fresh copy."
        ) from error
    _require_bounded(model, path)
    # lengths that somebody's training batches had, which transformers leaves aside as well
    model.no_truncation()
    model.no_padding()
    return model


def _require_bounded(model: Tokenizer, path: Path) -> None:
    """Check that a tokenizer does not replace characters with texts that fill the memory.

    Rust ends the process if the memory is used up.
    """
    for part in filter(None, (model.normalizer, model.decoder)):
        longest = _growth(json.loads(part.__getstate__()))
        if longest > _LONGEST_REPLACEMENT:
            raise UsageError(
                f"the tokenizer {path} replaces one character of a text with up to {longest} characters, "
                f"but at most {_LONGEST_REPLACEMENT} are allowed",
                remedy="Do not use this tokenizer if you do not trust its source.",
            )


def _growth(step: dict[str, Any]) -> int:
    """Return how many characters a step of a normalizer or decoder can make of one."""
    text = step.get("content", step.get("prepend", ""))
    steps = [*step.get("normalizers", []), *step.get("decoders", [])]
    return math.prod(map(_growth, steps)) * max(1, len(text) if isinstance(text, str) else 1)


def special_token(folder: Path, role: str) -> str | None:
    """Return the token that the files in a folder define for a role such as ``eos_token``, or None."""
    for name in (CONFIG, SPECIAL_TOKENS):
        token = read_object(folder / name).get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist."""
    try:
        values: Any = json.loads(files.text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
