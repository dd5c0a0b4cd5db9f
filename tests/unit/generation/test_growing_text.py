"""Pieces of a growing text: together they are the text, and none ends inside a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from megatron_npu.generation.sampling.growing_text import GrowingText
from megatron_npu.pretrain.data.tokenizers import NullTokenizer


def pieces(tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    growing = GrowingText(tokenizer, prompt)
    added = [growing.added(tokens[: number + 1]) for number in range(len(tokens))]
    return [*added, growing.rest()]


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_numbers_with_blanks_between(prompt, tokens):
    tokenizer = NullTokenizer(10)
    assert tokenizer.decode(prompt) + "".join(pieces(tokenizer, prompt, tokens)) == tokenizer.decode(
        [*prompt, *tokens]
    )


@pytest.mark.parametrize("text", ["plain words", "中文与日本語 and 🙂🙃", "é" * 30, "a🙂"])
def test_no_piece_ends_inside_a_character(gpt2_vocab, text):
    tokenizer = GPT2Tokenizer(*gpt2_vocab)
    for cut in (1, 3):
        ids = tokenizer.encode(text)
        found = pieces(tokenizer, ids[:cut], ids[cut:])
        assert "�" not in "".join(found[:-1])
        before = tokenizer.decode(ids[:cut])
        assert before + "".join(found) == text or before.endswith("�")


def test_bytes_that_are_no_character_come_at_the_end(gpt2_vocab):
    tokenizer = GPT2Tokenizer(*gpt2_vocab)
    ids = tokenizer.encode("🙂")
    assert pieces(tokenizer, tokenizer.encode("a"), ids[:-1]) == [*[""] * (len(ids) - 1), "�"]
