"""A vocabulary that does not fit its data is said by each command that meets both; one that fits is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import tiny, tiny_models, train_runs

pytest.importorskip("transformers")

WARNS = "% of the tokens of "


def corpus(folder: Path, fits: bool) -> Path:
    """Write texts of the tiny models' words, or of none of them."""
    words = tiny_models.WORDS[:8] if fits else ["quite", "another", "language", "here"] * 2
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for _ in range(40)))
    return path


@pytest.mark.parametrize("fits", [True, False])
def test_preprocess_with_a_vocab_txt(tmp_path, fits):
    vocabulary = tmp_path / "vocab.txt"
    special = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    vocabulary.write_text("\n".join([*special, *tiny_models.WORDS]) + "\n")
    line = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {vocabulary} --workers 2"
    data = ["--input", str(corpus(tmp_path, fits)), "--output-prefix", str(tmp_path / "data")]
    done = tiny.run("preprocess", *data, *line.split())
    assert done.returncode == 0, done.stderr
    assert (WARNS in done.stderr) is not fits
    if not fits:
        told = f"warning: 100% of the tokens of {tmp_path}/data_text_document.bin are unknown to --vocab-file"
        assert f"{told} {vocabulary}" in done.stderr


@pytest.mark.parametrize("fits", [True, False])
def test_preprocess_and_pretrain_with_a_tokenizer_json(tmp_path, fits):
    folder = tiny_models.gpt2(tmp_path / "gpt")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}".split()
    data = ["--input", str(corpus(tmp_path, fits)), "--output-prefix", str(tmp_path / "data")]
    done = tiny.run("preprocess", *data, *tokenizer)
    assert done.returncode == 0, done.stderr
    assert (f"unknown to --tokenizer-model {folder}" in done.stderr) is not fits
    size = "--num-layers 1 --hidden-size 16 --num-attention-heads 2"
    size += " --seq-length 8 --max-position-embeddings 8 --lr 1e-3"
    run = "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --eval-iters 0 --split 100,0,0"
    source = ["--data-path", str(tmp_path / "data_text_document")]
    done = tiny.run("pretrain", *tokenizer, *source, *size.split(), *run.split())
    assert done.returncode == 0, done.stderr
    told = f"megatron-npu pretrain: warning: 100{WARNS}the training data are unknown to"
    assert (f"{told} --tokenizer-model {folder}" in done.stderr) is not fits


@pytest.mark.parametrize("fits", [True, False])
def test_train(tmp_path, fits):
    folder = tiny_models.gpt2(tmp_path / "gpt")
    line = f"--task causal_lm --pretrained-model-name-or-path {folder} --data-path {corpus(tmp_path, fits)}"
    done = train_runs.train(*line.split(), "--train-iters", "1", "--seq-length", "8")
    assert done.returncode == 0, done.stderr
    told = (
        f"megatron-npu train: warning: 100{WARNS}the training data are unknown to the tokenizer of {folder}"
    )
    assert (told in done.stderr) is not fits


def test_train_with_a_tokenizer_that_leaves_the_words_out(tmp_path):
    folder = tiny_models.bert(tmp_path / "bert", "ForSequenceClassification")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "vocab.txt").write_text("\n".join(tiny_models.WORDS) + "\n")  # which RoBERTa's does not read
    added = {"5": {"content": "<dog>", "special": False}}
    own = {"tokenizer_class": "RobertaTokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    rows = "".join(f"{' '.join(tiny_models.WORDS[:8])},{number % 2}\n" for number in range(40))
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    line = f"--task sequence_classification --pretrained-model-name-or-path {folder}"
    line += f" --data-path {tmp_path}/rows.csv --train-iters 1 --seq-length 16"
    done = train_runs.train(*line.split())
    assert done.returncode == 0, done.stderr
    told = "warning: the first texts of the training data have only special tokens of the tokenizer of"
    assert f"megatron-npu train: {told} {folder}" in done.stderr
