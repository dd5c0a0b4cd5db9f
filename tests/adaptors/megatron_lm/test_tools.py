"""Other stock scripts: BERT and T5; and what a termination signal does."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

from megatron_npu.preprocessing import indexed_dataset
from tests import warm
from tests.adaptors.megatron_lm import runs
from tests.adaptors.megatron_lm.test_runs import TP2, deviation
from tests.conftest import LONGEST, on_a_leash, wait_until
from tests.end_to_end import tiny

WORDS = 250


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> list[str]:
    """The flags of a dataset of documents in sentences, with a WordPiece vocabulary."""
    folder = tmp_path_factory.mktemp("sentences")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "words.txt").write_text("\n".join([*special, *(f"w{n}" for n in range(WORDS))]) + "\n")
    generator = np.random.RandomState(1)
    with indexed_dataset.Writer(str(folder / "text"), np.dtype(np.uint16)) as writer:
        for _ in range(150):
            lengths = generator.randint(3, 20, generator.randint(2, 9)).astype(np.int32)
            tokens = (generator.randint(WORDS) + np.arange(lengths.sum())) % WORDS + len(special)
            writer.add(tokens.astype(np.uint16).tobytes(), lengths, np.array([len(lengths)], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    data = f"--vocab-file {folder}/words.txt --data-path {folder}/text --split 80,10,10"
    return f"{data} --tokenizer-type BertWordPieceLowerCase --train-iters 6".split()


T5 = (
    "--encoder-seq-length 64 --decoder-seq-length 32 --vocab-extra-ids 20 --kv-channels 16 "
    "--ffn-hidden-size 256 --num-layers 2 --use-flash-attn"
)


@pytest.mark.parametrize(
    ("script", "own"), [("pretrain_bert.py", ""), ("pretrain_t5.py", T5)], ids=["bert", "t5"]
)
def test_bert_and_t5(checkout, data, sentences, script, own):
    """Masks of padding, cross-attention, samples of sentences: as with upstream's operations, and at TP 2."""
    flags = [*runs.flags(data), *sentences, *own.split()]
    if own:  # T5 takes the lengths of encoder and decoder instead
        position = flags.index("--seq-length")
        del flags[position : position + 2]
    without_flash = [flag for flag in flags if flag != "--use-flash-attn"]
    stock = runs.run(checkout / script, without_flash, with_operations=False)
    expected = runs.losses(runs.succeeded(stock))
    for processes, layout in ((1, ""), (2, TP2)):
        result = runs.run(checkout / script, [*flags, *layout.split()], processes=processes)
        assert deviation(runs.losses(runs.succeeded(result)), expected) < 1e-4


def test_a_termination_signal_saves(checkout, data, tmp_path):
    """--exit-signal-handler: SIGTERM to torchrun, which passes it on, saves and ends the training."""
    flags = [*runs.flags(data), *"--train-iters 100000 --lr-decay-iters 100000".split()]
    flags += ["--exit-signal-handler", "--save", str(tmp_path), "--save-interval", "100000"]
    entry = ["-m", "megatron_npu", "run", str(checkout / "pretrain_gpt.py")]
    log = tmp_path / "log"
    command, env = warm.ready(
        [sys.executable, "-u", *tiny.torchrun(1), *entry, *flags],
        runs.environment(PYTHONUNBUFFERED="1"),
        warm.STOCK,
        checkout,
    )
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT)
    with on_a_leash(process):
        wait_until(lambda: "lm loss" in log.read_text(), process, lambda: log.read_text()[-3000:])
        process.send_signal(signal.SIGTERM)
        process.wait(LONGEST)
    assert "exiting program after receiving SIGTERM" in log.read_text()
    saved = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
    assert (tmp_path / f"iter_{int(saved):07d}" / "mp_rank_00" / "model_optim_rng.pt").is_file()
