"""Decode tokens one at a time, and return the characters that each new token adds to a text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_npu.data.tokenization.tokenizer import Tokenizer

_HALF = "�"  # what a character decodes to while tokens of it are missing
_WINDOW = 8  # tokens that are decoded again with a new one: what joins or separates neighbours is then seen


class GrowingText:
    """Decodes the text that follows a prompt, one token at a time.

    A single token cannot be decoded on its own: a character may consist of several tokens, and some
    tokenizers insert spaces between two tokens. Therefore, the last few tokens are decoded together, once
    with and once without the new token.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the ids that precede the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._ids = list(prompt[-_WINDOW:])
        self._start, self._told = 0, len(self._ids)  # decoded from, told up to

    def added(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the characters that are now complete.

        Args:
            tokens: all tokens that have been added after the prompt so far. There must be one more than in
                the previous call.
        """
        self._ids.append(tokens[-1])
        return self._new(complete=True)

    def rest(self) -> str:
        """Return the characters at the end of the text that are still incomplete."""
        return self._new(complete=False)

    def _new(self, complete: bool) -> str:
        before = self._decode(self._ids[self._start : self._told])
        now = self._decode(self._ids[self._start :])
        if complete and now.endswith(_HALF):
            return ""
        self._start, self._told = max(self._told - _WINDOW, 0), len(self._ids)
        return now[len(before) :]
