"""What inference asks of tokenizers that have no answer of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("single_process")

# U+FFFD stands for a character that is not complete yet
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}"))


@pytest.fixture(scope="module")
def byte_tokenizer(single_process):
    """A tokenizer with a token for each byte of UTF-8, as GPT-2's has for rare characters."""
    from megatron.core.datasets import megatron_tokenizer

    class Bytes(
        getattr(megatron_tokenizer, "MegatronLegacyTokenizer", None) or megatron_tokenizer.MegatronTokenizer
    ):
        vocab = inv_vocab = vocab_size = None

        def tokenize(self, text: str) -> np.ndarray:
            return list(text.encode())

        def detokenize(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    return Bytes("bytes")


@settings(max_examples=30)
@given(text=TEXTS)
def test_a_text_is_cut_where_its_tokens_begin(byte_tokenizer, text: str) -> None:
    starts = [place for place, character in enumerate(text) for _ in character.encode()]
    assert byte_tokenizer.offsets(byte_tokenizer.tokenize(text), text) == starts


def test_no_token_begins_a_text(byte_tokenizer) -> None:
    assert byte_tokenizer.bos is None
