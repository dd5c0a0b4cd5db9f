"""``--partitions``: the order of Megatron-LM's own tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu.preprocessing import jsonl
from megatron_npu.tokenization.gpt2_bpe import GPT2Tokenizer
from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE
from tests.unit.preprocessing.test_command import contents, texts

Write, Run = Callable[..., Path], Callable[..., Path]
TEXTS = ["zero", "", "two", ["three", "", "more"], [], *(f"{n} {SAMPLE[: n * 7]}" for n in range(5, 12))]


@pytest.mark.parametrize("batch", [1, 100, 1 << 18])
def test_documents_are_dealt_in_turn(
    tiny: Vocabulary, corpus_file: Write, preprocess: Run, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(jsonl.batches, "__defaults__", (batch,))
    file = corpus_file({"text": text} for text in TEXTS)
    tokenizer = GPT2Tokenizer(*tiny)
    in_order = texts(preprocess(file, prefix="one"), tokenizer)
    dealt = preprocess(file, prefix="three", flags=["--partitions", "3", "--workers", "2"])
    assert texts(dealt, tokenizer) == in_order[0::3] + in_order[1::3] + in_order[2::3]
    kept = preprocess(file, prefix="kept", flags=["--partitions", "3", "--keep-sequential-samples"])
    assert texts(kept, tokenizer) == in_order


def test_more_partitions_than_documents(tiny: Vocabulary, corpus_file: Write, preprocess: Run) -> None:
    file = corpus_file([{"text": "a"}, {"text": "b"}])
    assert texts(preprocess(file, flags=["--partitions", "5"]), GPT2Tokenizer(*tiny)) == ["a", "b"]


@pytest.mark.parametrize("more", [(), ("--keep-sequential-samples",)])
def test_bytes_of_the_stock_tool(
    gpt2_vocab: Vocabulary,
    corpus_file: Write,
    preprocess: Run,
    stock_tool: Callable[..., Path],
    more: tuple[str, ...],
) -> None:
    file = corpus_file({"text": text} for text in TEXTS)
    flags = ["--append-eod", "--workers", "2", "--partitions", "2", *more]
    ours = preprocess(file, vocabulary=gpt2_vocab, flags=flags)
    files = ["--vocab-file", str(gpt2_vocab.vocab_file), "--merge-file", str(gpt2_vocab.merge_file)]
    kind = ["--tokenizer-type", "GPT2BPETokenizer", "--legacy-tokenizer"]
    assert contents(stock_tool("--input", str(file), *kind, *files, *flags)) == contents(ours)
