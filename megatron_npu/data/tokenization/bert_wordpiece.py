"""Implement BERT's WordPiece tokenizer from ``vocab.txt``, with the same ids as Megatron's tokenizers.

Texts are split into words as in BERT's original code (Devlin et al., 2018), with Python's Unicode tables, as
in Megatron, because the ``tokenizers`` library uses another version of these tables. That library then
encodes each word.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError

UNKNOWN = "[UNK]"
NEEDED = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", UNKNOWN)
ADDED = ("[BOS]", "[EOS]")  # Megatron puts them behind the vocabulary where it lacks them
_LONGEST_WORD = 200  # letters; a longer word is unknown

# Blocks of Chinese characters: each character is a word of its own.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class _Cleaned(dict[int, str | None]):
    """A table for ``str.translate`` that drops control characters and normalizes spaces.

    The table also puts blanks around ideographs.
    """

    def __missing__(self, code: int) -> str | None:
        self[code] = result = _cleaned(chr(code))
        return result


class _Cut(dict[int, str | None]):
    """A table for ``str.translate`` that puts spaces around punctuation and, optionally, drops accents."""

    def __init__(self, strip_accents: bool) -> None:
        super().__init__()
        self._strip_accents = strip_accents

    def __missing__(self, code: int) -> str | None:
        letter = chr(code)
        accent = self._strip_accents and unicodedata.category(letter) == "Mn"
        self[code] = result = None if accent else f" {letter} " if _is_punctuation(letter) else letter
        return result


def _cleaned(letter: str) -> str | None:
    category = unicodedata.category(letter)
    if letter in "\t\n\r" or category == "Zs":
        return " "
    if letter == "\ufffd" or category in ("Cc", "Cf"):
        return None
    return f" {letter} " if any(low <= ord(letter) <= high for low, high in _IDEOGRAPHS) else letter


def _is_punctuation(letter: str) -> bool:
    """Return True if a character is punctuation, including ASCII symbols such as "$" and "+"."""
    return (letter.isascii() and letter.isprintable() and not letter.isalnum() and letter != " ") or (
        unicodedata.category(letter).startswith("P")
    )


class BertWordPieceTokenizer:
    """The BERT WordPiece tokenizer, which converts text to ids and back.

    ``[SEP]`` and similar tokens in a text are ordinary characters, as in Megatron.

    Args:
        vocab_file: ``vocab.txt``, one token per line; a token's id is its line number, counted from 0.
        lower_case: whether to convert to lower case and remove accents (BertWordPieceLowerCase).

    Raises:
        UsageError: the file is missing, not UTF-8, or lacks a special token.
    """

    def __init__(self, vocab_file: str | Path, *, lower_case: bool) -> None:
        vocabulary = read_vocabulary(vocab_file)
        for token in ADDED:
            vocabulary.setdefault(token, len(vocabulary))
        self.vocab_size: int = len(vocabulary)
        self.eod: int = vocabulary["[EOS]"]
        self.unknown: int | None = vocabulary[UNKNOWN]
        self._lower_case = lower_case
        self._cleaned, self._cut = _Cleaned(), _Cut(strip_accents=lower_case)
        self._tokenizer = Tokenizer(
            models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD)
        )
        self._tokenizer.decoder = decoders.WordPiece(cleanup=True)

    def words(self, text: str) -> list[str]:
        """Split a text into words, after cleaning it.

        Each punctuation mark and each ideograph is a separate word.
        """
        text = text.translate(self._cleaned)
        if self._lower_case:
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(self._cut).split()

    def encode_word(self, word: str) -> list[int]:
        """Return the ids of a word that ``words()`` has returned."""
        return self._tokenizer.encode(word).ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document token."""
        return self._tokenizer.encode(self.words(text), is_pretokenized=True).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text.

        Spaces, accents and capitals that encoding removed are not restored.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def read_vocabulary(path: str | Path) -> dict[str, int]:
    """Return the map from tokens to ids that a file ``vocab.txt`` defines.

    A repeated token gets its last id.

    Raises:
        UsageError: the file is not a BERT vocabulary.
    """
    remedy = "Pass the vocab.txt of a BERT model with --vocab-file."
    try:
        lines = given_files.text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--vocab-file {path} cannot be read: {reason}. {remedy}") from error
    if not lines[-1]:
        lines.pop()
    vocabulary = {line.strip(): number for number, line in enumerate(lines)}
    missing = [token for token in NEEDED if token not in vocabulary]
    if missing:
        raise UsageError(
            f"--vocab-file {path} lacks {', '.join(missing)}; it must contain BERT's tokens, one per line. "
            f"{remedy}"
        )
    return vocabulary
