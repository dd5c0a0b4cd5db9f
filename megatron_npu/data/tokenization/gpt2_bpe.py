"""Implement GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``, with the same ids as
GPT2BPETokenizer.

Texts are split into words by GPT-2's pattern, and the ``tokenizers`` library encodes each word. Texts are
split with the ``regex`` package, as in Megatron, because the Unicode tables of ``tokenizers`` are older, so
that thousands of newer letters would be split differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import unicode_text

END_OF_TEXT = "<|endoftext|>"

# The pattern published with GPT-2.
_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
# The same for texts of ASCII alone, where the standard library's engine is twice as fast. The alternatives
# begin with different characters but for the blanks, so that only the order of the last ones matters.
_ASCII_WORDS = re.compile(
    r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)| ?[0-9]+|\s+", re.ASCII
)


class GPT2Tokenizer:
    """The GPT-2 tokenizer, which converts text to ids and back.

    ``<|endoftext|>`` in a text is encoded as ordinary characters, as in Megatron; only programs add the id
    ``eod``.

    Args:
        vocab_file: ``vocab.json``, which maps tokens to ids. All ids must be below the number of entries.
        merge_file: ``merges.txt``, which has a version line followed by one merge per line, highest priority
            first.

    Raises:
        UsageError: a file is missing or invalid, the two files do not belong together, or ``<|endoftext|>``
            or the symbol of a byte is missing.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        vocabulary = _read_vocabulary(Path(vocab_file))
        merges = _read_merges(Path(merge_file))
        self.vocabulary: dict[str, int] = vocabulary
        self.vocab_size: int = len(vocabulary)
        self.eod: int = vocabulary[END_OF_TEXT]
        self.unknown: int | None = None  # every byte has a token
        try:
            model = models.BPE(vocab=vocabulary, merges=merges)
        except Exception as error:  # the library raises bare Exception
            raise UsageError(
                f"--merge-file {merge_file} does not match --vocab-file {vocab_file}: {error}. The parts "
                "and results of all merges must be in the vocabulary. Use the two files of the same model."
            ) from error
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    @staticmethod
    def words(text: str) -> list[str]:
        """Split a text into words that include their spaces.

        Joining the words restores the text.
        """
        return (_ASCII_WORDS if text.isascii() else _WORDS).findall(text)

    def encode_word(self, word: str) -> list[int]:
        """Return the ids of a word that ``words()`` has returned."""
        return self._tokenizer.encode(word).ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document token.

        Raises:
            UsageError: the text cannot be encoded as UTF-8.
        """
        try:
            return self._tokenizer.encode(self.words(text), is_pretokenized=True).ids
        except TypeError:
            unicode_text.require(text)
            raise

    def as_json(self) -> str:
        """Return this tokenizer in the format ``tokenizer.json``, for texts that are already split into
        words.
        """
        whole = Tokenizer(self._tokenizer.model)
        whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        whole.decoder = decoders.ByteLevel()
        return whole.to_str()

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text.

        Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary, which a model with a padded
        vocabulary can generate, are skipped.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _read(path: Path, flag: str) -> str:
    try:
        return given_files.text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(
            f"{flag} {path} cannot be read: {reason}. Pass the path of GPT-2's file with {flag}."
        ) from error


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Read the map from tokens to ids from a file.

    Raises:
        UsageError: the file is not the vocabulary of a byte-level BPE.
    """
    remedy = "Pass the vocab.json of a GPT-2 model with --vocab-file."
    try:
        vocabulary: Any = json.loads(_read(path, "--vocab-file"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--vocab-file {path} is not valid JSON: {error}. {remedy}") from error
    if not isinstance(vocabulary, dict) or not all(type(i) is int for i in vocabulary.values()):
        raise UsageError(f"--vocab-file {path} must be a JSON object that maps tokens to ids. {remedy}")
    missing = [
        symbol for symbol in (*pre_tokenizers.ByteLevel.alphabet(), END_OF_TEXT) if symbol not in vocabulary
    ]
    if missing:
        raise UsageError(
            f"--vocab-file {path} must contain a token for each of the 256 bytes and {END_OF_TEXT}, but "
            f"{sorted(missing)[0]!r} is missing ({len(missing)} in total). {remedy}"
        )
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UsageError(
            f"--vocab-file {path} must use each id from 0 to {len(vocabulary) - 1} exactly once, but it has "
            f"{len(vocabulary)} entries with ids up to {max(vocabulary.values())}. {remedy}"
        )
    return vocabulary


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Read the pairs of tokens to merge, starting with the highest priority.

    The first line of the file, its version, is skipped.

    Raises:
        UsageError: a line is not a pair.
    """
    merges = []
    for number, line in enumerate(_read(path, "--merge-file").split("\n")[1:], start=2):
        pair = line.split()
        if len(pair) == 2:
            merges.append((pair[0], pair[1]))
        elif pair:
            raise UsageError(
                f"{path}:{number}: each line must consist of two tokens separated by a space, but got "
                f"{line[:60]!r}. Pass the merges.txt of a GPT-2 model with --merge-file."
            )
    return merges
