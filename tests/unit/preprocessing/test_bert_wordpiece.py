"""BERT's tokenizer: the words and ids of Megatron-LM 285068c8's own, and datasets made with it."""

from __future__ import annotations

import importlib.util
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import command, indexed_dataset
from megatron_npu.data.tokenization.bert_wordpiece import BertWordPieceTokenizer
from megatron_npu.upstream import megatrons
from tests.conftest import checkout

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *"the un ##aff ##able ##s σ ς ##σ ##ς é e ##e ß 你 好 [ ] sep ##̇ i".split()]
WORDS += [chr(code) for code in range(33, 127) if chr(code) not in WORDS]
PIECES = [
    "unaffable",
    "The ",
    "ΑΣ",
    "İ",
    "é",
    "ß",
    "你好",
    "[SEP]",
    "x" * 201,
    "\u200b",
    "\t",
    "$1.50",
    "\ufffd",
]


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """Upstream's module, which imports nothing of upstream."""
    file = (
        checkout("megatron_lm", megatrons.LEGACY_VERSION) / "megatron" / "tokenizer" / "bert_tokenization.py"
    )
    spec = importlib.util.spec_from_file_location("their_bert_tokenization", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


@pytest.mark.parametrize("lower_case", [True, False])
def test_words_are_upstream_s_for_every_kind_of_letter(
    vocab_file: Path, theirs: ModuleType, lower_case: bool
) -> None:
    """A thousand letters of each category of Unicode, or all of it, in the middle of a word and alone."""
    ours = BertWordPieceTokenizer(vocab_file, lower_case=lower_case)
    upstream_s = theirs.BasicTokenizer(do_lower_case=lower_case)
    letters: dict[str, list[str]] = {}
    for code in range(sys.maxunicode + 1):
        found = letters.setdefault(unicodedata.category(chr(code)), [])
        if len(found) < 1000 and not 0xD800 <= code < 0xE000:
            found.append(chr(code))
    for category, some in letters.items():
        text = " ".join(f"aA{letter}Bb {letter}" for letter in some)
        assert ours.words(text) == upstream_s.tokenize(text), category


@pytest.mark.parametrize("lower_case", [True, False])
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12))
def test_ids_are_upstream_s(
    vocab_file: Path, theirs: ModuleType, lower_case: bool, pieces: list[str]
) -> None:
    text = "".join(pieces)
    full = theirs.FullTokenizer(str(vocab_file), do_lower_case=lower_case)
    expected = full.convert_tokens_to_ids(full.tokenize(text))
    ours = BertWordPieceTokenizer(vocab_file, lower_case=lower_case)
    assert ours.encode(text) == expected
    assert [number for word in ours.words(text) for number in ours.encode_word(word)] == expected


def test_text_of_ids(vocab_file: Path) -> None:
    tokenizer = BertWordPieceTokenizer(vocab_file, lower_case=True)
    assert tokenizer.decode(tokenizer.encode("The unaffables!")) == "the unaffables!"
    assert tokenizer.vocab_size == len(WORDS) + 2
    assert tokenizer.eod == len(WORDS) + 1  # [EOS], behind [BOS]


def test_unfit_vocabularies_are_named(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    with pytest.raises(UsageError, match=r"--vocab-file .*vocab\.txt cannot be read: No such file"):
        BertWordPieceTokenizer(file, lower_case=True)
    file.write_text("[PAD]\n[UNK]\nthe\n")
    with pytest.raises(UsageError, match=r"lacks \[CLS\], \[SEP\], \[MASK\]"):
        BertWordPieceTokenizer(file, lower_case=True)
    file.write_bytes(b"\xff\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        BertWordPieceTokenizer(file, lower_case=True)


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_a_dataset(tmp_path: Path, vocab_file: Path, corpus_file: Callable[..., Path], kind: str) -> None:
    file = corpus_file([{"text": "The unaffable cat."}, {"text": "É"}])
    flags = ["--tokenizer-type", kind, "--vocab", str(vocab_file), "--append-eod", "--workers", "2"]
    assert command.main(["--input", str(file), "--output-prefix", str(tmp_path / "out"), *flags]) == 0
    tokenizer = BertWordPieceTokenizer(vocab_file, lower_case=kind.endswith("LowerCase"))
    found = np.fromfile(tmp_path / "out_text_document.bin", np.uint16).tolist()
    parts = [[*tokenizer.encode(text), tokenizer.eod] for text in ("The unaffable cat.", "É")]
    assert found == parts[0] + parts[1]
    assert indexed_dataset.validate(tmp_path / "out_text_document", tokenizer.vocab_size).documents == 2
