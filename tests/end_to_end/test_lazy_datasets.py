"""A training on a dataset of ``preprocess --dataset-impl lazy`` or ``cached``: as on one of ``mmap``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_npu.commands import cli
from tests.support import stock_lm, tiny

TEXTS = ["the first text of many", "another one " * 30, "", "a third, which is longer: " * 20] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary and three datasets of the same texts."""
    folder = tmp_path_factory.mktemp("lazy")
    vocabulary, merges = stock_lm.write_vocabulary(folder)
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = f"--vocab-file {vocabulary} --merge-file {merges} --append-eod --input {source}".split()
    for kind in ("mmap", "lazy", "cached"):
        output = ["--dataset-impl", kind, "--output-prefix", str(folder / kind)]
        assert cli.main(["preprocess", *words, *output]) == 0
    assert (folder / "lazy_text_document.idx").read_bytes()[:8] == b"TNTIDX\0\0"
    return folder


def trained(folder: Path, kind: str) -> list[float]:
    """Return the losses of ``pretrain``, that of validation last."""
    log = folder / f"{kind}.log"
    words = (
        f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    )
    flags = [*tiny.flags_for(folder / f"{kind}_text_document"), *words.split(), "--split", "70,30,0"]
    place = flags.index("--vocab-size")
    del flags[place : place + 2]  # which the tokenizer says
    done = tiny.run("pretrain", *flags, "--train-iters", "3", "--json-log", str(log))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [row["loss"] for row in [*tiny.rows(log), *tiny.rows(log, "validation")]]


def test_the_driver_trains_on_it(folder):
    losses = trained(folder, "mmap")
    assert len(losses) == 4
    assert losses[2] < losses[0]
    assert trained(folder, "lazy") == trained(folder, "cached") == losses
