"""The stock ``tools/preprocess_data.py``, and the script of the guide that runs it for T5 and BERT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import processes, stock_lm, walk, warm
from tests.support.tiny import ROOT

TEXTS = [
    "It's a test: 1,024 tokens… “quoted”, naïve café, 東京, and    blanks.\n\nA second paragraph.",
    "Short.",
    *(f"Line {n} says that {n} times {n} is {n * n}. It's true; isn't it?" for n in range(60)),
]


def test_gives_the_bytes_that_our_tool_gives(checkout, gpt2_vocab, tmp_path):
    pytest.importorskip("nltk", reason="upstream's tool needs nltk even where no sentences are split")
    text = tmp_path / "text.json"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS))
    files = f"--vocab-file {gpt2_vocab.vocab_file} --merge-file {gpt2_vocab.merge_file}"
    common = f"--input {text} {files} --tokenizer-type GPT2BPETokenizer --append-eod".split()
    script = checkout / "tools" / "preprocess_data.py"
    theirs = ["--output-prefix", str(tmp_path / "theirs"), "--dataset-impl", "mmap"]
    theirs += ["--chunk-size", "25", "--workers", "2"]
    stock_lm.succeeded(stock_lm.run(script, [*common, *theirs]))
    command = [sys.executable, "-m", "megatron_npu", "preprocess", *common]
    processes.run(
        [*command, "--output-prefix", str(tmp_path / "ours")], env=stock_lm.environment(), check=True
    )
    for suffix in ("bin", "idx"):
        content = [(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for name in ("theirs", "ours")]
        assert len(content[0]) > 1000
        assert content[0] == content[1]


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_gives_the_bytes_that_our_tool_gives_for_bert(checkout, tmp_path, kind):
    """Sentences, each a sequence, in the words of BERT."""
    pytest.importorskip("nltk", reason="needs nltk: sentences are split with it")
    walk.write_sentence_model(tmp_path / "nltk")
    text, vocab_file = tmp_path / "text.json", tmp_path / "vocab.txt"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS))
    words = (
        "[PAD] [UNK] [CLS] [SEP] [MASK] line times it is true ##s a b c t e s ##e ##t ! ? . ' 1 2 ##1 naive"
    )
    vocab_file.write_text("\n".join(words.split()) + "\n")
    common = f"--input {text} --vocab-file {vocab_file} --tokenizer-type {kind} --dataset-impl mmap".split()
    common += ["--split-sentences", "--chunk-size", "25", "--workers", "2"]
    data = {"NLTK_DATA": str(tmp_path / "nltk")}
    script = checkout / "tools" / "preprocess_data.py"
    theirs = stock_lm.run(script, [*common, "--output-prefix", str(tmp_path / "theirs")], **data)
    stock_lm.succeeded(theirs)
    command = [sys.executable, "-m", "megatron_npu", "preprocess", *common]
    command += ["--output-prefix", str(tmp_path / "ours")]
    processes.run(command, env=stock_lm.environment(**data), check=True)
    for suffix in ("bin", "idx"):
        content = [(tmp_path / f"{name}_text_sentence.{suffix}").read_bytes() for name in ("theirs", "ours")]
        assert len(content[0]) > 1000
        assert content[0] == content[1]


def test_script_of_t5_splits_sentences(checkout, tmp_path):
    """WikiExtractor's files in folders become documents of sentences."""
    pytest.importorskip("nltk", reason="needs nltk: sentences are split with it")
    walk.write_sentence_model(tmp_path / "nltk")
    words = "mr the cat sat on a mat . dog ran home".split()
    data, articles = tmp_path / "data", tmp_path / "text" / "AA"
    data.mkdir()
    articles.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (data / "bert-large-uncased-vocab.txt").write_text("\n".join([*special, *words]) + "\n")
    (articles / "wiki_00").write_text(json.dumps({"text": "Mr. Cat sat. A dog ran home."}) + "\n")
    (articles / "wiki_01").write_text(json.dumps({"text": "The cat ran."}) + "\n")
    changes = {
        "MEGATRON_LM_PATH": checkout,
        "NLTK_DATA": tmp_path / "nltk",
        "DATA_DIR": data,
        "INPUT": tmp_path / "text",
        "WORKERS": "1",
        "GPT": "no",
    }
    result = processes.run(
        ["bash", str(ROOT / "tests" / "dataset_preprocess_t5.sh")],
        env=warm.for_scripts(stock_lm.environment(**{name: str(value) for name, value in changes.items()})),
        capture_output=True,
        text=True,
        check=False,
    )
    stock_lm.succeeded(result)
    number = {word: len(special) + position for position, word in enumerate(words)}
    sentences = ["mr . cat sat .", "a dog ran home .", "the cat ran ."]
    expected = [number[word] for sentence in sentences for word in sentence.split()]
    found = np.fromfile(data / "my-t5_text_sentence.bin", np.uint16)
    assert found.tolist() == expected
    lengths = sentence_lengths(data / "my-t5_text_sentence.idx", len(sentences))
    assert lengths == [len(sentence.split()) for sentence in sentences]


def sentence_lengths(index: Path, sentences: int) -> list[int]:
    """Return the first lengths that an index file tells, behind its header of 34 bytes."""
    return np.fromfile(index, np.int32, sentences, offset=34).tolist()
