"""Declare the flags for a tokenizer and its files, which have the names of Megatron's flags in every
command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_npu.base.arg_parser import whole

Add = Callable[..., Any]
VOCAB_JSON = "GPT-2's vocab.json"


def add_tokenizer(
    add: Add,
    kinds: Sequence[str],
    meaning: str,
    *,
    vocab_file_aliases: Sequence[str] = (),
    vocab_file: str = VOCAB_JSON,
) -> None:
    """Add ``--tokenizer-type`` and the flags for tokenizer files to a parser.

    Args:
        add: ``add_argument`` of a parser or group.
        kinds: the supported tokenizers, by Megatron's names; the first is the default.
        meaning: the help text of ``--tokenizer-type``.
        vocab_file_aliases: other spellings of ``--vocab-file``.
        vocab_file: a description of the file, for the help text.
    """
    add("--tokenizer-type", choices=kinds, default=kinds[0], help=meaning)
    add_gpt2_files(add, vocab_file_aliases=vocab_file_aliases, vocab_file=vocab_file)
    add(
        "--tokenizer-model",
        metavar="DIR",
        help="tokenizer.json of a HuggingFaceTokenizer, or the folder that contains it",
    )


def add_null_end(add: Add) -> None:
    """Add ``--null-tokenizer-eod-id`` to a parser."""
    add(
        "--null-tokenizer-eod-id",
        type=whole,
        metavar="ID",
        help="end-of-document id of the NullTokenizer (default: its last id, --vocab-size)",
    )


def add_gpt2_files(
    add: Add, note: str = "", *, vocab_file_aliases: Sequence[str] = (), vocab_file: str = VOCAB_JSON
) -> None:
    """Add ``--vocab-file`` and ``--merge-file`` to a parser.

    Args:
        add: ``add_argument`` of a parser or group.
        note: the end of the help texts.
        vocab_file_aliases: other spellings of ``--vocab-file``.
        vocab_file: a description of the file, for the help text.
    """
    add("--vocab-file", *vocab_file_aliases, metavar="FILE", help=f"{vocab_file}{note}")
    add("--merge-file", metavar="FILE", help=f"GPT-2's merges.txt{note}")
