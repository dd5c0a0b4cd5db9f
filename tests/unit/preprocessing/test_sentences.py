"""``--split-sentences``: nltk's Punkt, and what is said where it is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing.sentences import Sentences
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from tests.conftest import Vocabulary
from tests.support import walk
from tests.unit.preprocessing.test_command import contents, texts

Write, Run = Callable[..., Path], Callable[..., Path]
TEXTS = ["Mr. Cat sat.  A dog\nran home!\n\nWho? He.", "", "no end", "A.  ", "\n"]


@pytest.fixture
def nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of English alone, where nltk looks."""
    data = pytest.importorskip("nltk", reason="sentences are split with nltk: not installed").data
    walk.write_sentence_model(tmp_path / "nltk_data")
    monkeypatch.setattr(data, "path", [str(tmp_path / "nltk_data")])
    return tmp_path / "nltk_data"


def test_sentences_with_and_without_their_blanks(nltk_data: Path) -> None:
    assert Sentences("english", keep_newlines=False).splitter()(TEXTS[0]) == [
        "Mr. Cat sat.",
        "A dog\nran home!",
        "Who?",
        "He.",
    ]
    kept = Sentences("english", keep_newlines=True).splitter()(TEXTS[0])
    assert kept == ["Mr. Cat sat.  ", "A dog\nran home!\n\n", "Who? ", "He."]
    assert "".join(kept) == TEXTS[0]


def test_each_sentence_is_a_sequence(
    nltk_data: Path, tiny: Vocabulary, tmp_path: Path, corpus_file: Write, preprocess: Run
) -> None:
    file = corpus_file({"text": text} for text in [*TEXTS, ["One. Two.", "Three."]])
    preprocess(file, flags=["--split-sentences", "--append-eod", "--workers", "2"])
    found = texts(tmp_path / "out_text_sentence", GPT2Tokenizer(*tiny))
    assert found[0] == "Mr. Cat sat.A dog\nran home!Who?He.<|endoftext|>"
    assert found[-1] == "One.Two.Three.<|endoftext|>"
    assert not list(tmp_path.glob("out_text_document*"))


def test_bytes_of_the_stock_tool(
    nltk_data: Path,
    tmp_path: Path,
    gpt2_vocab: Vocabulary,
    corpus_file: Write,
    preprocess: Run,
    stock_tool: Callable[..., Path],
) -> None:
    """With two partitions Megatron-LM's tool splits and encodes in one run, with one in two."""
    file = corpus_file({"text": text} for text in TEXTS)
    flags = ["--append-eod", "--split-sentences", "--workers", "2", "--partitions", "2"]
    flags += ["--keep-newlines", "--keep-sequential-samples"]
    files = ["--vocab-file", str(gpt2_vocab.vocab_file), "--merge-file", str(gpt2_vocab.merge_file)]
    kind = ["--tokenizer-type", "GPT2BPETokenizer", "--legacy-tokenizer"]
    preprocess(file, vocabulary=gpt2_vocab, flags=flags)
    home = {"HOME": str(tmp_path), "NLTK_DATA": ""}  # nltk looks in ~/nltk_data
    stock = stock_tool("--input", str(file), *kind, *files, *flags, level="sentence", **home)
    assert contents(tmp_path / "out_text_sentence") == contents(stock)


def test_what_is_missing_is_said(
    nltk_data: Path, corpus_file: Write, preprocess: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = corpus_file([{"text": "A."}])
    for language in ("german", "../english"):
        with pytest.raises(
            UsageError,
            match=rf"--lang {language}: nltk's sentence model for this language is not installed.*"
            r"nltk\.downloader",
        ):
            preprocess(file, flags=["--split-sentences", "--lang", language])
    with pytest.raises(UsageError, match="--keep-newlines requires --split-sentences"):
        preprocess(file, flags=["--keep-newlines"])
    with pytest.raises(
        UsageError,
        match="--stride and --split-sentences are mutually exclusive, because windows would split sentences",
    ):
        preprocess(file, flags=["--split-sentences", "--seq-length", "8", "--stride", "8"])
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(UsageError, match=r"requires nltk 3\.9 or newer.*pip install nltk"):
        preprocess(file, flags=["--split-sentences"])
