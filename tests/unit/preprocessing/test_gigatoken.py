"""GPT-2's tokens by the package gigatoken are our own tokenizer's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.data.tokenization import gigatoken_bpe
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE
from tests.unit.preprocessing.test_command import ODD, contents

pytestmark = pytest.mark.skipif(not gigatoken_bpe.is_used(), reason=gigatoken_bpe.said())


@pytest.fixture(scope="module")
def both(tiny: Vocabulary) -> tuple[Callable[[str], list[int]], Callable[[str], list[int]]]:
    tokenizer = GPT2Tokenizer(*tiny)
    fast = gigatoken_bpe.encoder(tokenizer)
    return tokenizer.encode, lambda text: fast(text).tolist()


@given(st.one_of(st.text(max_size=60), st.text(" \n\t'strvemld1a\u2028\u00e9", max_size=60)))
def test_drawn_texts(both, text: str) -> None:
    slow, fast = both
    assert fast(text) == slow(text)


def test_characters_between_letters_digits_and_blanks(both) -> None:
    """Of the planes with letters, whether Unicode has assigned them or not."""
    slow, fast = both
    codes = [code for code in range(0x33480) if not 0xD800 <= code < 0xF900]  # surrogates, private use
    different = []
    for code in codes:
        text = f"a{chr(code)}a 1{chr(code)}1 {chr(code)}{chr(code)}"
        if fast(text) != slow(text):
            different.append(hex(code))
    assert different == []


def test_a_dataset_has_the_same_bytes(preprocess, corpus_file, monkeypatch, capsys) -> None:
    documents = corpus_file([{"text": text} for text in [*ODD, SAMPLE * 40]])
    fast = contents(preprocess(documents, flags=["--append-eod"]))
    assert capsys.readouterr().err.startswith("tokenizing for GPT-2 with gigatoken 0.10.")
    monkeypatch.setattr(gigatoken_bpe, "version", lambda: "0.11.0")
    slow = contents(preprocess(documents, prefix="slow", flags=["--append-eod"]))
    assert "which is several times as fast: 0.11.0 is installed" in capsys.readouterr().err
    assert fast == slow


def test_without_it_the_line_says_so(monkeypatch) -> None:
    monkeypatch.setattr(gigatoken_bpe, "version", lambda: None)
    assert not gigatoken_bpe.is_used()
    assert gigatoken_bpe.said().endswith("it is not installed (pip install 'megatron_npu[fast]')")
