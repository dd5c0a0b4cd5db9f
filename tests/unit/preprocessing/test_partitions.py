"""``--partitions`` and ``--keep-sequential-samples``: the order of the input, whatever they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE
from tests.unit.preprocessing.test_command import contents

Write, Run = Callable[..., Path], Callable[..., Path]
TEXTS = ["zero", "", "two", ["three", "", "more"], [], *(f"{n} {SAMPLE[: n * 7]}" for n in range(5, 12))]


def test_the_order_stays(tiny: Vocabulary, corpus_file: Write, preprocess: Run) -> None:
    file = corpus_file({"text": text} for text in TEXTS)
    in_order = contents(preprocess(file, prefix="one"))
    assert (
        contents(preprocess(file, prefix="three", flags=["--partitions", "3", "--workers", "2"])) == in_order
    )
    flags = ["--partitions", "3", "--keep-sequential-samples"]
    assert contents(preprocess(file, prefix="kept", flags=flags)) == in_order


def test_bytes_of_the_stock_tool_that_keeps_it(
    gpt2_vocab: Vocabulary, corpus_file: Write, preprocess: Run, stock_tool: Callable[..., Path]
) -> None:
    file = corpus_file({"text": text} for text in TEXTS)
    flags = ["--append-eod", "--workers", "2", "--partitions", "2", "--keep-sequential-samples"]
    ours = preprocess(file, vocabulary=gpt2_vocab, flags=flags)
    files = ["--vocab-file", str(gpt2_vocab.vocab_file), "--merge-file", str(gpt2_vocab.merge_file)]
    kind = ["--tokenizer-type", "GPT2BPETokenizer", "--legacy-tokenizer"]
    assert contents(stock_tool("--input", str(file), *kind, *files, *flags)) == contents(ours)
