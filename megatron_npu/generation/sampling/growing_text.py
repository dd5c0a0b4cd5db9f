"""Incremental decoding: the characters that each new token adds to a text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_npu.data.tokenization.tokenizer import Tokenizer

_HALF = "�"  # what a character decodes to while tokens of it are missing
_WINDOW = 8  # tokens that are decoded again with a new one: what joins or separates neighbours is then seen


class GrowingText:
    """The text behind a prompt.

    A token alone has no text: characters can be spread over several tokens, and some tokenizers put a blank
    between two. So a few tokens are decoded together, before and after.

    Args:
        tokenizer: the model's.
        prompt: ids before the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._ids = list(prompt[-_WINDOW:])
        self._start, self._told = 0, len(self._ids)  # decoded from, told up to

    def added(self, tokens: Sequence[int]) -> str:
        """Return the characters that are new and complete.

        Args:
            tokens: all that were added behind the prompt so far, one more than in the call before.
        """
        self._ids.append(tokens[-1])
        return self._new(complete=True)

    def rest(self) -> str:
        """Return the characters that never became complete, when the text has ended."""
        return self._new(complete=False)

    def _new(self, complete: bool) -> str:
        before = self._decode(self._ids[self._start : self._told])
        now = self._decode(self._ids[self._start :])
        if complete and now.endswith(_HALF):
            return ""
        self._start, self._told = max(self._told - _WINDOW, 0), len(self._ids)
        return now[len(before) :]
