"""Small runs of the stock scripts of a Megatron-LM 285068c8 checkout, each in separate processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_npu.data.preprocessing import indexed_dataset
from tests.support import bytecode, tiny, warm

END = 256  # <|endoftext|>, behind the 256 bytes
LAYERS, HIDDEN, HEADS, LENGTH, BATCH = 4, 64, 4, 64, 8


def write_vocabulary(folder: Path, *, merges: Sequence[str] = ()) -> tuple[Path, Path]:
    """Write a GPT-2 vocabulary of the 256 bytes, <|endoftext|> and the pairs in ``merges``; return its files.

    GPT-2 spells a byte as itself where that is printable, else as the next letter from U+0100 on.

    Args:
        folder: the folder in which vocab.json and merges.txt are written.
        merges: pairs of tokens with a blank between; each is a token of its own, numbered from 257 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = [*map(chr, printable), *(chr(256 + number) for number in range(len(others)))]
    names = [*spelled, "<|endoftext|>", *(pair.replace(" ", "") for pair in merges)]
    vocab_file, merge_file = folder / "vocab.json", folder / "merges.txt"
    vocab_file.write_text(json.dumps({name: number for number, name in enumerate(names)}))
    merge_file.write_text("\n".join(["#version: 0.2", *merges, ""]))
    return vocab_file, merge_file


def write_dataset(prefix: Path, documents: int = 200, seed: int = 0) -> Path:
    """Write documents that count up in steps of 1 to 3; return the prefix."""
    generator = np.random.RandomState(seed)
    with indexed_dataset.Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            length, start, step = generator.randint([30, 0, 1], [200, 256, 4])
            tokens = ((start + step * np.arange(length)) % 256).astype(np.uint16)
            tokens[-1] = END
            writer.add(tokens.tobytes(), np.array([length], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    return prefix


def write_data(folder: Path) -> Path:
    """Write a vocabulary and a GPT dataset, which ``flags`` names; return the folder."""
    write_vocabulary(folder)
    write_dataset(folder / "text")
    return folder


def write_sentences(folder: Path, words: int = 250) -> None:
    """Write a WordPiece vocabulary and documents in sentences, which ``sentence_flags`` names."""
    if (folder / "words.txt").exists():
        return
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "words.txt").write_text("\n".join([*special, *(f"w{n}" for n in range(words))]) + "\n")
    generator = np.random.RandomState(1)
    with indexed_dataset.Writer(str(folder / "sentences"), np.dtype(np.uint16)) as writer:
        for _ in range(150):
            lengths = generator.randint(3, 20, generator.randint(2, 9)).astype(np.int32)
            tokens = (generator.randint(words) + np.arange(lengths.sum())) % words + len(special)
            writer.add(tokens.astype(np.uint16).tobytes(), lengths, np.array([len(lengths)], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])


def flags(folder: Path) -> list[str]:
    """Return the flags of a run with the data in ``folder``; later flags on a command line override them."""
    return [
        *f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS}".split(),
        *f"--seq-length {LENGTH} --max-position-embeddings {LENGTH}".split(),
        *f"--micro-batch-size 2 --global-batch-size {BATCH} --lr 1e-3 --min-lr 1e-4 --clip-grad 1.0".split(),
        *"--train-iters 25 --lr-decay-iters 25 --lr-warmup-iters 2 --weight-decay 0.01".split(),
        *"--log-interval 1 --eval-iters 1 --eval-interval 1000 --split 90,5,5 --seed 1234".split(),
        *"--attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --num-workers 0".split(),
        *f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt".split(),
        *f"--data-path {folder}/text --make-vocab-size-divisible-by 64".split(),
    ]


BERT, T5 = "pretrain_bert.py", "pretrain_t5.py"
_OF_T5 = (
    "--encoder-seq-length 64 --decoder-seq-length 32 --vocab-extra-ids 20 --kv-channels 16 "
    "--ffn-hidden-size 256 --num-layers 2"
)


def sentence_flags(folder: Path, script: str) -> list[str]:
    """Return the flags of a ``BERT`` or ``T5`` run with the data in ``folder``."""
    given = flags(folder)
    if script == T5:  # takes the lengths of encoder and decoder instead
        position = given.index("--seq-length")
        given[position : position + 2] = _OF_T5.split()
    data = f"--vocab-file {folder}/words.txt --data-path {folder}/sentences --split 80,10,10"
    return [*given, *data.split(), "--tokenizer-type", "BertWordPieceLowerCase"]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process: this plug-in, one thread, and the CPU."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tiny.ROOT)]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MEGATRON_NPU_DEVICE": "cpu"}
    return {**os.environ, **own, **bytecode.elsewhere(), **changes}


BASELINE = Path(__file__).resolve().parents[1] / "adaptors" / "megatron_lm" / "baseline.py"


def run(
    script: Path,
    arguments: Iterable[str],
    *,
    processes: int = 1,
    with_operations: bool = True,
    timeout: float = 240,
    **changes: str,
) -> subprocess.CompletedProcess[str]:
    """Run a stock script to its end with ``megatron-npu run``, under torchrun for several processes.

    Args:
        script: a script of the checkout.
        arguments: its command line.
        with_operations: whether to use this project's operations. If False, upstream's own are used; see
            ``baseline``.
        changes: changes to the environment.
    """
    launcher = tiny.torchrun(processes)
    entry = ["-m", "megatron_npu", "run"] if with_operations else [str(BASELINE)]
    command = [sys.executable, *(launcher if processes > 1 else []), *entry, str(script)]
    tree = next((folder for folder in Path(script).parents if (folder / "megatron" / "model").is_dir()), None)
    return warm.run(
        [*command, *map(str, arguments)],
        env=environment(**changes),
        modules=warm.STOCK if with_operations and tree else (),
        tree=tree,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    """Check that a run succeeded, and return its output."""
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return result.stdout


# upstream's default, and what checkpoint_util.py takes whatever the training had
TOOL_MULTIPLE = "--make-vocab-size-divisible-by 128"


def change_layout(checkout: Path, source: Path, target: Path, tensor: int, pipeline: int) -> None:
    """Convert a GPT checkpoint to other parallel sizes with the stock ``tools/checkpoint_util.py``.

    The vocabulary is next to the source, as ``vocab.json``; its padding is adjusted to the new size.
    """
    sizes = f"--target-tensor-parallel-size {tensor} --target-pipeline-parallel-size {pipeline}"
    vocabulary = f"--vocab-file {source.parent}/vocab.json"
    command = f"--model-type GPT --load-dir {source} --save-dir {target} {sizes} {vocabulary}".split()
    output = succeeded(run(checkout / "tools" / "checkpoint_util.py", command))
    assert output.count("successfully saved checkpoint") == tensor * pipeline, output[-3000:]


_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([0-9.E+-]+)")


def losses(output: str) -> dict[int, float]:
    """Return the loss of each iteration in Megatron's log."""
    found = {int(iteration): float(loss) for iteration, loss in _LOSS.findall(output)}
    assert found, output[-3000:]
    return found


_ACCURACY = re.compile(r"number correct: (\S+) \| total examples: (\S+)")


def accuracy(output: str) -> tuple[int, int]:
    """Return the number of correct LAMBADA examples, and of all examples, that the stock task prints."""
    found = _ACCURACY.search(output)
    assert found, output[-3000:]
    correct, total = map(float, found.groups())
    return int(correct), int(total)
