"""Runs of Megatron-LM's own scripts of a core_v0.* tree, unedited, as a user starts them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import numpy as np

from megatron_npu.data.preprocessing import indexed_dataset
from tests.conftest import LONGEST
from tests.support import processes, tiny, warm
from tests.support.simulated import run_simulated

# --transformer-impl is left at its default, transformer_engine, which is not installed
FLAGS = [
    *"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split(),
    *"--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3".split(),
    *"--train-iters 6 --log-interval 1 --eval-interval 100 --eval-iters 1 --split 90,5,5".split(),
    *"--tokenizer-type NullTokenizer --vocab-size 1023 --attention-dropout 0 --hidden-dropout 0".split(),
    # forks for each of three datasets would take a third of such a run; BERT and T5 below have them
    *"--num-workers 0".split(),
]

# models of sentences: what each script takes besides SENTENCES
LAYERS = {
    "pretrain_bert.py": "--num-layers 2 --seq-length 64".split(),
    "pretrain_t5.py": [
        *"--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 64".split(),
        *"--decoder-seq-length 32 --kv-channels 16 --ffn-hidden-size 128 --vocab-extra-ids 100".split(),
    ],
}
SENTENCES = [
    *"--hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --micro-batch-size 4".split(),
    *"--global-batch-size 8 --lr 1e-2 --lr-decay-style constant --train-iters 12 --log-interval 1".split(),
    *"--eval-interval 100 --eval-iters 1 --split 80,10,10 --attention-dropout 0 --hidden-dropout 0".split(),
]

Run = subprocess.CompletedProcess[str]


@functools.cache
def as_found(tree: Path) -> str:
    """Return what ``git_status`` says before the first script of this process: no script may change it."""
    return git_status(tree)


def git_status(tree: Path) -> str:
    return processes.run(
        ["git", "-C", tree, "status", "--short"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def pretrain(
    tree: Path,
    folder: Path,
    *changes: str,
    processes: int = 1,
    device: str = "cpu",
    data: Path | None = None,
    **variables: str,
) -> Run:
    """Run pretrain_gpt.py of ``tree`` in ``folder``, and check that the tree is unchanged.

    Args:
        changes: flags to add after ``FLAGS``, which they override.
        device: ``cpu``, or ``npu`` for simulated Ascend NPUs.
        data: the prefix of the dataset. If None, upstream's mock data is used.
        variables: additional environment variables.
    """
    arguments = [*(["--data-path", str(data)] if data else mock_data()), *FLAGS, *changes]
    return run_script(
        tree, folder, "pretrain_gpt.py", *arguments, processes=processes, device=device, **variables
    )


def mock_data() -> list[str]:
    """Return the flags of upstream's mock data, whose indices each process of the suite builds once.

    They take half a second, of a run that takes two: the data have 100,000 documents.
    """
    folder = warm.home() / f"indices{os.environ.get('PYTEST_XDIST_WORKER', '')}"
    return ["--mock-data", "--data-cache-path", str(folder)]


def run_script(
    tree: Path,
    folder: Path,
    script: str,
    *arguments: str,
    processes: int = 1,
    device: str = "cpu",
    **variables: str,
) -> Run:
    """Run ``script``, a path in ``tree``, in ``folder``, and check that the tree is unchanged."""
    before = as_found(tree)
    command = tiny.command("run", str(tree / script), *arguments, processes=processes)
    variables = {"MEGATRON_LM_PATH": str(tree), **variables}
    if device == "npu":
        done = run_simulated(
            *command, cwd=folder, timeout=LONGEST, modules=warm.STOCK, tree=tree, **variables
        )
        done.stderr = done.stdout  # it has both
    else:
        done = warm.run(
            command,
            env=tiny.environment() | variables,
            modules=warm.STOCK,
            tree=tree,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
    assert git_status(tree) == before
    return done


def losses(done: Run) -> list[float]:
    """Return the training losses that the script has logged, one for each iteration."""
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"iteration .* lm loss: (\S+)", done.stdout)]


def norms(done: Run) -> list[float]:
    """Return the gradient norms that the script has logged."""
    return [float(norm) for norm in re.findall(r"grad norm: (\S+)", done.stdout)]


def final_loss(done: Run) -> str:
    """Return the loss on the test set."""
    return re.search(r"test set \| lm loss value: (\S+)", done.stdout)[1]


def write_sentences(folder: Path, *, documents: int = 60, words: int = 200) -> list[str]:
    """Write documents that consist of sentences, and their vocabulary; return the flags that select both."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = folder / "vocabulary.txt"
    vocabulary.write_text("\n".join([*special, *(f"word{n}" for n in range(words))]) + "\n")
    generator = np.random.default_rng(0)
    with indexed_dataset.Writer(str(folder / "sentences"), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            lengths = generator.integers(4, 20, size=int(generator.integers(3, 8))).astype(np.int32)
            # few of the words are in use, which is learned in a few steps
            tokens = len(special) + generator.integers(0, words // 20, size=int(lengths.sum()))
            writer.add(tokens.astype(np.uint16).tobytes(), lengths, np.array([len(lengths)], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    return ["--vocab-file", str(vocabulary), "--data-path", str(folder / "sentences")]


def learns_from_sentences(tree: Path, folder: Path, script: str, *flags: str) -> None:
    """Run a BERT or T5 script until it has learned which words occur."""
    model = LAYERS[Path(script).name]
    done = run_script(tree, folder, script, *write_sentences(folder), *model, *SENTENCES, *flags)
    curve = losses(done)
    assert len(curve) == 12
    assert curve[-1] < curve[0] - 0.3
    assert "on test set | lm loss value" in done.stdout
