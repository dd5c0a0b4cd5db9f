"""Detect a vocabulary that does not match the data, because most words then become the unknown token."""

from __future__ import annotations

LIMIT = 0.3  # of all tokens; text in the language of its vocabulary has less than a hundredth
SAMPLES = 64  # that are looked at where a run begins


def warning(unknown: int, tokens: int, data: str, tokenizer: str) -> str:
    """Return a warning if a text has many unknown tokens, otherwise an empty string.

    Args:
        unknown: the number of unknown tokens.
        tokens: the number of all tokens.
        data: a description of the encoded data.
        tokenizer: the tokenizer's file or folder, with the flag that names it.
    """
    if unknown <= LIMIT * tokens:
        return ""
    return (
        f"warning: {unknown / tokens:.0%} of the tokens of {data} are unknown to {tokenizer}, so the "
        "model cannot learn them. Check that the vocabulary fits this text and this type of tokenizer."
    )


def no_words(data: str, tokenizer: str) -> str:
    """Return the warning for texts of which nothing is left but special tokens.

    A tokenizer without an unknown token leaves out the words that it does not know.

    Args:
        data: a description of the encoded data.
        tokenizer: the tokenizer's file or folder, with the flag that names it.
    """
    return (
        f"warning: the first texts of {data} have only special tokens of {tokenizer}, so the model cannot "
        "learn them. Check that the vocabulary fits this text and this type of tokenizer."
    )
