"""The tokenizer against GPT-2's published algorithm, written out plainly here."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTER_OF_UNICODE_15 = "\U00031350"


class Plain:
    """GPT-2's BPE as published: in each word merge the best pair until none is left."""

    def __init__(self, files: Vocabulary) -> None:
        self.ids = json.loads(files.vocab_file.read_text(encoding="utf-8"))
        lines = files.merge_file.read_text(encoding="utf-8").split("\n")[1:-1]
        self.ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.symbols = {byte: chr(byte) for byte in printable}
        self.symbols |= {byte: chr(256 + place) for place, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        return [self.ids[part] for word in regex.findall(PATTERN, text) for part in self.split(word)]

    def split(self, word: str) -> list[str]:
        parts = [self.symbols[byte] for byte in word.encode()]
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            merged: list[str] = []
            for part in parts:
                follows = merged and (merged[-1], part) == best
                merged[-1:] = [merged[-1] + part] if follows else [*merged[-1:], part]
            parts = merged
        return parts


@pytest.fixture(scope="module")
def tokenizer(tiny: Vocabulary) -> GPT2Tokenizer:
    return GPT2Tokenizer(*tiny)


@pytest.fixture(scope="module")
def plain(tiny: Vocabulary) -> Plain:
    return Plain(tiny)


@given(text=st.text(max_size=60))
def test_ids_are_those_of_the_published_algorithm(tokenizer: GPT2Tokenizer, plain: Plain, text: str) -> None:
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet="aZ09'  \t\n\r\x0b\x0c\x1c\x1f\x00_-.,stmdrevl", max_size=30))
def test_the_ascii_pattern_cuts_as_the_full_one(text: str) -> None:
    assert GPT2Tokenizer.words(text) == regex.findall(PATTERN, text)


def test_every_ascii_triple_of_kinds_is_cut_alike() -> None:
    kinds = "a5'.st \n\x1c"
    for text in (x + y + z + w for x in kinds for y in kinds for z in kinds for w in kinds):
        assert GPT2Tokenizer.words(text) == regex.findall(PATTERN, text)


def test_letters_newer_than_the_tables_of_tokenizers_are_letters() -> None:
    text = f"a{LETTER_OF_UNICODE_15}b"
    assert GPT2Tokenizer.words(text) == [text]


def test_gpt2_ids(gpt2_vocab: Vocabulary) -> None:
    tokenizer = GPT2Tokenizer(*gpt2_vocab)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    text = SAMPLE * 3 + LETTER_OF_UNICODE_15 + "<|endoftext|>" + "x" * 500
    assert tokenizer.encode(text) == Plain(gpt2_vocab).encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_of_text_in_a_text_is_no_eod(tokenizer: GPT2Tokenizer) -> None:
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_decode_leaves_out_ids_of_the_padding(tokenizer: GPT2Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("rose"), tokenizer.vocab_size + 5]) == "rose"


def _without(vocabulary: dict[str, int], token: str) -> dict[str, int]:
    return {key: value for key, value in vocabulary.items() if key != token}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vocabulary: _without(vocabulary, "<|endoftext|>"), "endoftext"),
        (lambda vocabulary: _without(vocabulary, "A"), "but 'A' is missing"),
        (lambda vocabulary: vocabulary | {"A": 9999}, "9999"),
        (lambda vocabulary: list(vocabulary), "a JSON object that maps tokens to ids"),
        (lambda vocabulary: vocabulary | {"A": "1"}, "a JSON object that maps tokens to ids"),
    ],
)
def test_unfit_vocabulary(tiny: Vocabulary, tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(change(json.loads(tiny.vocab_file.read_text()))))
    with pytest.raises(UsageError, match=message):
        GPT2Tokenizer(path, tiny.merge_file)


@pytest.mark.parametrize(
    ("text", "message"),
    [("#version\nt h e\n", "merges.txt:2"), ("#version\nQQ ZZ\n", "same model"), (None, "No such file")],
)
def test_unfit_merges(tiny: Vocabulary, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "merges.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        GPT2Tokenizer(tiny.vocab_file, path)


def test_broken_vocabulary_file(tiny: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes(b'{"a": ')
    with pytest.raises(UsageError, match=r"vocab\.json"):
        GPT2Tokenizer(tmp_path / "vocab.json", tiny.merge_file)
