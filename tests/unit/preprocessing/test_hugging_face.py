"""Datasets with a tokenizer of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_npu.commands import cli
from megatron_npu.data.preprocessing import command, indexed_dataset
from tests.unit.preprocessing.conftest import SAMPLE

TEXTS = ["a b", SAMPLE, ["a b", "", "c"], [], "", "</s> in a <s>text"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level BPE with a begin and an end of a text, as a Llama 3 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    place = tmp_path / "tokenizer"
    place.mkdir()
    tokenizer.save(str(place / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (place / "tokenizer_config.json").write_text(json.dumps(kind))
    return place


def run(file: Path, folder: Path, *flags: str) -> Path:
    """Run the command; return the prefix that it has written."""
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    prefix = file.with_suffix("")
    assert command.main(["--input", str(file), "--output-prefix", str(prefix), *kind, *flags]) == 0
    return prefix.with_name(f"{prefix.name}_text_document")


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(f"{prefix.name}.{kind}").read_bytes() for kind in ("bin", "idx")]


@pytest.mark.parametrize("special", [False, True])
def test_documents_are_the_tokenizer_s_and_any_workers_give_the_same(
    folder: Path, corpus_file: Callable[[Iterable[object]], Path], special: bool
) -> None:
    file = corpus_file({"text": text} for text in TEXTS)
    flags = ["--append-eod", *(["--tokenizer-hf-include-special-tokens"] if special else [])]
    one = contents(run(file, folder, *flags))
    assert contents(run(file, folder, *flags, "--workers", "2")) == one
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected: list[int] = []
    for text in TEXTS:
        parts = text if isinstance(text, list) else [text]
        ids = [id for part in parts for id in tokenizer.encode(part, add_special_tokens=special).ids]
        expected += [*ids, 1] if ids else []
    assert list(memoryview(one[0]).cast("H")) == expected
    assert indexed_dataset.validate(str(file.with_suffix("")) + "_text_document", 300).documents == len(TEXTS)


def test_bytes_of_the_stock_tool(
    folder: Path, corpus_file: Callable[[Iterable[object]], Path], stock_tool: Callable[..., Path]
) -> None:
    pytest.importorskip("transformers")
    file = corpus_file({"text": text} for text in TEXTS)
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    stock = stock_tool("--input", str(file), "--workers", "1", *kind, "--append-eod")
    assert contents(run(file, folder, "--append-eod")) == contents(stock)


def test_a_tokenizer_without_an_end_token_is_refused(
    folder: Path, corpus_file: Callable[..., Path], capsys
) -> None:
    """With --append-eod and without it: a training ends its documents with that token, too."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    file = corpus_file([{"text": "a"}])
    line = ["preprocess", "--input", str(file), "--output-prefix", str(file)]
    line += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    for more in ([], ["--append-eod"]):
        assert cli.main([*line, *more]) == 2
        assert "tokenizer_config.json sets eos_token to None" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["normalizer", "decoder"])
def test_a_tokenizer_that_fills_the_memory_is_refused(
    place: str, folder: Path, corpus_file: Callable[..., Path], capsys
) -> None:
    """30 kB of it made 13 GB of one line, and the process ended without a message."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file = corpus_file([{"text": "a"}])
    line = ["preprocess", "--input", str(file), "--output-prefix", str(file)]
    line += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    for content, code in (("b" * 10, 0), ("b" * 100, 2)):
        kind = normalizers if place == "normalizer" else decoders
        steps = [kind.Replace("a", content), kind.Replace("b", content)]
        setattr(tokenizer, place, kind.Sequence([*steps, *([kind.NFC()] if place == "normalizer" else [])]))
        tokenizer.save(str(folder / "tokenizer.json"))
        assert cli.main(line) == code
    assert "replaces one character of a text with up to 10000 characters" in capsys.readouterr().err


def test_missing_files_are_named(folder: Path, corpus_file: Callable[..., Path], capsys) -> None:
    file = corpus_file([{"text": "a"}])
    line = ["preprocess", "--input", str(file), "--output-prefix", str(file)]
    for kind, named in (
        ([], "--vocab-file and --merge-file"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "--tokenizer-model"),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(file)], "tokenizer.json"),
    ):
        assert cli.main([*line, *kind]) == 2
        assert named in capsys.readouterr().err
