"""Test whether a switch changes what a model learns: loss and accuracy at the end, with and without it.

    python benchmarks/convergence.py [--scale 1.0] [--seeds 3] [--only "bert: zero-1" ...] [--at-once 2]

Every row is a command line of ``megatron-npu`` on two ranks of a CPU, run to its end with each seed. The
``bert`` rows fine-tune a small BERT to classify made-up sentences, which it learns except for the wrong
labels; the ``gpt`` rows train Megatron's GPT with the built-in trainer on the bytes of this project's pages.
A seed determines the initial weights and the order of the data, for all rows. A row is compared with the
first one of its kind, seed by seed. Results go to benchmarks/results/convergence/cpu.json, with the commit;
scripts/convergence_page.py writes docs/records/convergence.md from them, with the expected results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.forks import fork  # noqa: E402

RANKS = 2
WORDS = ("good", "bad", "plain")  # kinds of words, twenty each
TRAINED, VALIDATED = 4000, 1000  # rows of the made-up sentences
WRONG = 0.02  # part of the labels that are not what the words say: nobody is right of all
STEPS = {"bert": 160, "gpt": 100}
MORE_SEEDS = 2  # times --seeds for the rows without switches, whose spread is what others are held against
_FLAGS = {
    "bert": (
        "--task sequence_classification --micro-batch-size 16 --global-batch-size 32 --seq-length 16"
        " --lr 1e-3"
    ),
    "gpt": (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
        " --micro-batch-size 8 --global-batch-size 16 --lr 5e-3 --split 90,10,0 --eval-iters 20"
        " --tokenizer-type NullTokenizer --vocab-size 255 --hidden-dropout 0 --attention-dropout 0"
    ),
}
_ZERO = "--zero-{}-memory-optimization"
_ACTIVATIONS = "--checkpoint-activations"
_CUT = "--tensor-model-parallel-size 2"
# the document's switches, then what its command lines put together
ROWS: dict[str, str] = {
    "bert: none": "",
    "bert: mixed-precision bf16": "--mixed-precision bf16",
    "bert: mixed-precision fp16": "--mixed-precision fp16",
    "bert: zero-1": _ZERO.format(1),
    "bert: zero-2": _ZERO.format(2),
    "bert: zero-3": _ZERO.format(3),
    "bert: fsdp": "--fsdp-memory-optimization",
    "bert: checkpoint-activations": _ACTIVATIONS,
    "bert: fused-ops": "--fused-ops",
    "bert: onnx-runtime-training": "--onnx-runtime-training",
    "bert: mixed-precision, zero-3": f"--mixed-precision {_ZERO.format(3)}",
    "bert: mixed-precision, onnx-runtime-training, zero-1": (
        f"--mixed-precision --onnx-runtime-training {_ZERO.format(1)}"
    ),
    "gpt: none": "",
    "gpt: mixed-precision bf16": "--mixed-precision bf16",
    "gpt: mixed-precision fp16": "--mixed-precision fp16",
    "gpt: zero-1": _ZERO.format(1),
    "gpt: zero-2": _ZERO.format(2),
    "gpt: fsdp": "--fsdp-memory-optimization",
    "gpt: checkpoint-activations": _ACTIVATIONS,
    "gpt: tensor parallel 2": _CUT,
    "gpt: pipeline parallel 2": "--pipeline-model-parallel-size 2",
    "gpt: mixed-precision, zero-2, checkpoint-activations, tensor parallel 2": (
        f"--mixed-precision {_ZERO.format(2)} {_ACTIVATIONS} {_CUT}"
    ),
}

FRESH = ("gpt: zero-2",)  # Megatron's FSDP reads its own checkpoints alone; the seed makes the same weights


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything; the JSON file is written after each training run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor by which the number of steps is multiplied"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument(
        "--at-once", type=int, default=2, help="number of rows that are trained at the same time"
    )
    parser.add_argument(
        "--go-on", action="store_true", help="keep the rows that an earlier call wrote to the file"
    )
    parser.add_argument(
        "--json", type=Path, help="write to this file instead of benchmarks/results/convergence/cpu.json"
    )
    args = parser.parse_args(argv)
    kept = {"MEGATRON_NPU_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {**kept, "TOKENIZERS_PARALLELISM": "false"}
    _import()
    path = args.json or ROOT / "benchmarks" / "results" / "convergence" / "cpu.json"
    rows: dict[str, dict[str, Any]] = earlier(path, args.only) if args.go_on else {}
    seeds = {row: args.seeds * (1 if ROWS[row] else MORE_SEEDS) for row in args.only}
    jobs = [[row, seed] for row, count in seeds.items() for seed in range(count)]
    jobs = [[row, seed] for row, seed in jobs if str(seed) not in rows.get(row, ())]
    steps = {kind: max(2, round(count * args.scale)) for kind, count in STEPS.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def keep(row: str, seed: int) -> None:
            rows.setdefault(row, {})[str(seed)] = found(row, seed, folder)
            inner = {row: dict(sorted(rows[row].items())) for row in ROWS if row in rows}
            _write(path, args.seeds, {"steps": steps, "rows": inner})

        begun = dict.fromkeys((row.split(":")[0], seed) for row, seed in jobs)
        _in_turn([list(one) for one in begun], 1, lambda job: begin(job[0], job[1], folder), lambda *_: None)
        _in_turn(jobs, args.at_once, lambda job: train(job[0], job[1], steps, folder), keep)


def earlier(path: Path, only: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the rows of an earlier call.

    Raises:
        SystemExit: rows of ``gpt`` were trained on other pages.
    """
    content = json.loads(path.read_text())
    if content["pages"] != digest() and any(row.startswith("gpt") for row in only):
        raise SystemExit(
            f"{path}: the pages have changed since that run. Train all rows of gpt again, without --go-on"
        )
    return dict(content["rows"])


def digest() -> str:
    """Return the checksum of the bytes on which ``gpt`` is trained."""
    return hashlib.sha256(b"".join(tokens.tobytes() for tokens in pages())).hexdigest()


def _import() -> None:
    """Import what the runs need once, before they are forked."""
    import megatron.core.datasets.gpt_dataset
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    import torch
    import torch._dynamo
    import transformers.data.data_collator
    import transformers.models.bert.modeling_bert  # noqa: F401

    import megatron_npu.finetune.run.command
    import megatron_npu.pretrain.run.pretrain  # noqa: F401

    torch.set_num_threads(1)


def _write(path: Path, seeds: int, results: dict[str, Any]) -> None:
    from importlib.metadata import version

    from benchmarks import report

    known = {
        "threads": 1,
        "ranks": RANKS,
        "seeds": seeds,
        "commit": _commit(),
        "asked": list(ROWS),
        "pages": digest(),
    }
    names = {"transformers": version("transformers"), "megatron-core": version("megatron-core")}
    report.write(path, {**known, **results}, **names)


def _commit() -> str:
    """Return the abbreviated hash of the last commit that changed the package."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "megatron_npu"]
    return subprocess.run(command, timeout=60, capture_output=True, text=True, check=True).stdout.strip()


def _in_turn(jobs: list[list[Any]], at_once: int, call: Any, done: Any) -> None:
    """Call ``call`` for each job in a separate fork, ``at_once`` at a time; then call ``done`` here."""
    running: dict[int, list[Any]] = {}
    waiting = list(jobs)
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            running[_start(job, call)] = job
        process, status = os.wait()
        job = running.pop(process)
        if status:
            raise RuntimeError(f"{job} failed")
        done(*job)


def _start(job: list[Any], call: Any) -> int:
    process = os.fork()
    if process:
        return process
    try:
        call(job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


# --- What the rows of a seed begin with.


def begin(kind: str, seed: int, folder: Path) -> None:
    """Write data and weights for a seed to ``folder``/KIND-SEED."""
    here = folder / f"{kind}-{seed}"
    here.mkdir(parents=True)
    (write_bert if kind == "bert" else write_gpt)(here, seed)


def write_bert(here: Path, seed: int) -> None:
    """Write two data files, and a BERT with two layers and a tokenizer for these words."""
    import torch
    import transformers

    drawn = random.Random(0)  # the same rows for all seeds
    (here / "data").mkdir()
    for part, count in (("train", TRAINED), ("validation", VALIDATED)):
        rows = (f"{json.dumps(row(drawn))}\n" for _ in range(count))
        (here / "data" / f"{part}.jsonl").write_text("".join(rows))
    words = [f"{kind}{number}" for kind in WORDS for number in range(20)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (here / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    transformers.BertTokenizerFast(str(here / "vocab.txt")).save_pretrained(here / "model")
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        max_position_embeddings=16,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertModel(config).save_pretrained(here / "model")


def row(drawn: random.Random) -> dict[str, Any]:
    """Return twelve words in two sentences and a label, sometimes wrong: whether most words are good."""
    opinions = [drawn.choice(WORDS[:2]) for _ in range(5)]
    kinds = [*opinions, *["plain"] * 7]
    drawn.shuffle(kinds)
    words = [f"{kind}{drawn.randrange(20)}" for kind in kinds]
    label = int(opinions.count("good") > opinions.count("bad"))
    label = 1 - label if drawn.random() < WRONG else label
    return {"sentence1": " ".join(words[:6]), "sentence2": " ".join(words[6:]), "label": label}


def write_gpt(here: Path, seed: int) -> None:
    """Write the bytes of this project's pages as tokens, and a GPT's initial weights."""
    import numpy as np

    from megatron_npu.data.preprocessing import indexed_dataset

    with indexed_dataset.Writer(str(here / "pages"), np.dtype(np.uint16)) as writer:
        for tokens in pages():
            writer.add(tokens.tobytes(), np.array([len(tokens)], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    words = (
        f"--save {here}/model --exit-interval 1 --train-iters 2 --no-save-optim --lr 0 --json-log {here}/log"
    )
    _ranks(["pretrain", *_words("gpt", here, seed), *words.split()], here, 1)


def pages() -> Iterator[Any]:
    """Yield the bytes of each English page, ``[n]``, terminated by 255, which never occurs in UTF-8."""
    import numpy as np

    for page in sorted((ROOT / "docs").rglob("*.md")):
        if "zh" not in page.parts and page.name != "convergence.md":  # the page of the numbers themselves
            yield np.append(np.frombuffer(page.read_bytes(), np.uint8).astype(np.uint16), np.uint16(255))


def _words(kind: str, here: Path, seed: int) -> list[str]:
    """Return what all rows of a seed share."""
    words = [*_FLAGS[kind].split(), "--no-plot", "--seed", str(seed + 1)]
    if kind == "bert":
        return [*words, "--pretrained-model-name-or-path", f"{here}/model", "--data-path", f"{here}/data"]
    return [*words, "--data-path", f"{here}/pages", "--data-cache-path", f"{here}/cache"]


# --- A row.


def train(name: str, seed: int, steps: dict[str, int], folder: Path) -> None:
    """Run the command line of a row with a seed to its end, keeping only its log."""
    kind = name.split(":")[0]
    count = steps[kind]
    here, mine = folder / f"{kind}-{seed}", _place(name, seed, folder)
    mine.mkdir()
    words = [*_words(kind, here, seed), *ROWS[name].split(), "--json-log", f"{mine}/log"]
    words += (
        f"--train-iters {count} --lr-warmup-fraction 0.1 --log-interval 1 --eval-interval {count}".split()
    )
    if kind == "gpt":
        words += [
            "--lr-decay-style",
            "linear",
            *([] if name in FRESH else ["--load", f"{here}/model", "--finetune"]),
        ]
    begun = time.perf_counter()
    _ranks(["train" if kind == "bert" else "pretrain", *words], mine, RANKS)
    print(
        f"{name}, seed {seed}: {time.perf_counter() - begun:.0f} s, {found(name, seed, folder)}", flush=True
    )


def _place(name: str, seed: int, folder: Path) -> Path:
    return folder / f"row-{list(ROWS).index(name)}-{seed}"


def _ranks(command: list[str], here: Path, ranks: int) -> None:
    """Run a ``megatron-npu`` command in forks, as ``torchrun`` would; their output goes to a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def be_a_rank(rank: int) -> None:
        from megatron_npu.commands import cli

        with open(here / f"out-{rank}", "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if code := cli.main(command):
            raise SystemExit(code)

    try:
        fork(be_a_rank, ranks, " ".join(command))
    except RuntimeError:
        for rank in range(ranks):
            sys.stderr.write((here / f"out-{rank}").read_text()[-4000:])
        raise


def found(name: str, seed: int, folder: Path) -> dict[str, float]:
    """Return the means of the first and the last losses, and the results on held-out data."""
    lines = [json.loads(line) for line in (_place(name, seed, folder) / "log").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "train"]
    last = [line for line in lines if line["event"] == "validation"][-1]
    some = max(1, len(losses) // 10)
    found = {"first": losses[0], "last": sum(losses[-some:]) / some, "validation": last["loss"]}
    accuracy = {"accuracy": last["metrics"]["accuracy"]} if "accuracy" in last.get("metrics", ()) else {}
    return {**found, **accuracy}


if __name__ == "__main__":
    main()
