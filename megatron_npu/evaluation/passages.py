"""Read LAMBADA passages, each of which consists of a context and the tokens to predict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Literal, NamedTuple

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.data.tokenizers import Tokenizer, continuation

Cut = Literal["token", "word", "lm-eval"]


class Example(NamedTuple):
    """A passage, which consists of input tokens and the tokens to predict."""

    context: list[int]
    answer: list[int]


def read_examples(file: str, tokenizer: Tokenizer, *, cut: Cut, longest: int) -> list[Example]:
    """Return the passages in a file, each truncated to its last ``longest`` input tokens.

    The first process prints how many passages were truncated.

    Args:
        file: a file of JSON lines with the key ``text``.
        tokenizer: the tokenizer of the model.
        cut: what to predict: ``token`` (the last token); ``word`` (the last word, tokenized separately, as
            with Megatron's ``--strict-lambada``); or ``lm-eval`` (the same target as lm-eval's
            lambada_openai task).
        longest: the number of positions of the model.

    Raises:
        UsageError: the file does not exist or contains no passage, a line is malformed, or a passage is too
            short.
    """
    try:
        lines = given_files.lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--valid-data {file} cannot be read as a JSON-lines file: {error}. Correct the path."
        ) from error
    examples, longer = [], 0
    for number, line in enumerate(lines, 1):
        try:
            example = CUTS[cut](json.loads(line)["text"], tokenizer)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            expected = 'a JSON object with a passage of two words or more as "text"'
            raise UsageError(
                f"{file}, line {number} must be {expected}, but it is {line[:40]!r}. Correct the line."
            ) from error
        asked = len(example.answer)
        room = longest + 1 - asked  # for the context
        if not example.context or not asked or room < 1:
            raise UsageError(
                f"{file}, line {number}: the passage has {len(example.context)} tokens, and its last word "
                f"{asked}; there must be at least one token before the word, and both must fit into the "
                f"model's {longest} positions. Remove the passage, or use a model with more positions."
            )
        longer += len(example.context) > room
        examples.append(Example(example.context[-room:], example.answer))
    if not examples:
        raise UsageError(
            f"--valid-data {file} contains no passages, but at least one is required. Correct the path."
        )
    if longer and not int(os.environ.get("RANK", "0")):
        print(
            f" > {longer} passages are longer than {longest} tokens; only their last {longest} tokens are "
            "used"
        )
    return examples


def _last_token(text: str, tokenizer: Tokenizer) -> Example:
    ids = tokenizer.encode(text)
    return Example(ids[:-1], ids[-1:])


def _last_word(text: str, tokenizer: Tokenizer) -> Example:
    word = text.split()[-1]
    context = text[: text.rfind(word)].strip()
    return Example(tokenizer.encode(context), continuation(tokenizer, context, " " + word))


def _as_lm_eval(text: str, tokenizer: Tokenizer) -> Example:
    """Split a passage as lm-eval 0.4 does: only at the last space, using the ids of the whole text."""
    before, blank, word = text.rpartition(" ")
    context = before.rstrip()
    ids = tokenizer.encode(context)
    return Example(ids, tokenizer.encode(context + before[len(context) :] + blank + word)[len(ids) :])


# how a text is cut, by what is to be found
CUTS: dict[Cut, Callable[[str, Tokenizer], Example]] = {
    "token": _last_token,
    "word": _last_word,
    "lm-eval": _as_lm_eval,
}
