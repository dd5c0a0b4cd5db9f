"""The guide of GPT-2 345M typed on this tree: data, training, samples, a conversation; with small sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_npu.data.preprocessing import indexed_dataset
from tests.support import processes, stock_lm

pytest.importorskip("deepspeed")

_SIZES = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
)
_TRAIN = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 1024
--num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 --seq-length 1024
--max-position-embeddings 1024 --train-iters 5000 --lr-decay-iters 320000 --data-impl mmap --split 949,50,1
--distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
--clip-grad 1.0 --lr-warmup-fraction .01 --checkpoint-activations --log-interval 10 --save-interval 500
--eval-interval 100 --eval-iters 10 --fp16"""
_TEXT = """--tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --num-attention-heads 16
--max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer --fp16 --micro-batch-size 2 --seq-length 1024
--out-seq-length 1024 --temperature 1.0 --top_p 0.9 --recompute"""


def test_the_guide_as_it_is_typed(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("nltk", reason="upstream's tool needs nltk even where no sentences are split")
    vocabulary, merges = stock_lm.write_vocabulary(tmp_path)
    text = tmp_path / "oscar.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"a tale of {n} and {n * n}. " * 8}) + "\n" for n in range(60))
    )
    files = ["--vocab-file", str(vocabulary), "--merge-file", str(merges)]

    prefix = tmp_path / "meg-gpt2"
    nine = ["--input", text, "--output-prefix", prefix, "--vocab", vocabulary, "--dataset-impl", "mmap"]
    nine += ["--tokenizer-type", "GPT2BPETokenizer", "--merge-file", merges, "--append-eod", "--workers", "2"]
    stock_lm.succeeded(stock_lm.run(checkout / "tools" / "preprocess_data.py", map(str, nine)))
    data = f"{prefix}_text_document"
    assert indexed_dataset.validate(data).documents == 60

    saved = ["--load", str(tmp_path / "gpt2")]
    last = (
        f"{_SIZES} --train-iters 3 --initial-loss-scale 1024 --log-interval 1 --eval-iters 1 --num-workers 0"
    )
    places = [*saved, "--save", str(tmp_path / "gpt2"), "--data-path", data, *files]
    trained = stock_lm.run(checkout / "pretrain_gpt.py", [*_TRAIN.split(), *places, *last.split()])
    assert sorted(stock_lm.losses(stock_lm.succeeded(trained))) == [1, 2, 3]
    assert (tmp_path / "gpt2" / "latest_checkpointed_iteration.txt").read_text() == "3"

    tool = checkout / "tools" / "generate_samples_gpt.py"
    samples = tmp_path / "unconditional_samples.json"
    words = [*_TEXT.split(), *saved, *files, *_SIZES.split(), "--out-seq-length", "12"]
    stock_lm.succeeded(stock_lm.run(tool, [*words, "--genfile", str(samples), "--num-samples", "2"]))
    assert len([json.loads(line)["text"] for line in samples.read_text().splitlines()]) == 2

    talk = processes.run(
        [sys.executable, "-m", "megatron_npu", "run", str(tool), *words, "--num-samples", "0"],
        env=stock_lm.environment(),
        input="huawei\n\nstop\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Context: huawei" in stock_lm.succeeded(talk)
