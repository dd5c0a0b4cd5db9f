"""The main job: real English text, a GPT of about 10M parameters: train, validate, save, reload, sample.

    python demo/run.py            go on where the last run stopped
    python demo/run.py --clean    start over (the old run is kept as runs/demo.old)

Everything lies in runs/demo; the table printed at the end is also runs/demo/summary.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from fetch import fetch

from megatron_npu.base import files

PROJECT = Path(__file__).resolve().parent.parent
RUN = PROJECT / "runs" / "demo"
DATA, CHECKPOINT = RUN / "data", RUN / "checkpoint"
PREFIX = DATA / "corpus_text_document"
TOKENIZER = ["--vocab-file", str(DATA / "gpt2-vocab.json"), "--merge-file", str(DATA / "gpt2-merges.txt")]
PROMPT = "ROMEO.\nBut soft, what light"

MODEL = (
    "--num-layers 8 --hidden-size 320 --num-attention-heads 5 --seq-length 256 --max-position-embeddings 256"
)
TRAINING = (
    "--micro-batch-size 4 --global-batch-size 4 --train-iters 300 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 "
    "--attention-dropout 0 --hidden-dropout 0 --split 95,5,0 --eval-interval 100 --eval-iters 8 "
    "--save-interval 100 --log-interval 10 --seed 1234"
)


def main() -> None:
    """Run every step that is not done yet, then print and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clean", action="store_true", help="start over; the data are kept")
    if parser.parse_args().clean:
        set_aside()
    files.tighten_umask()
    step("1/4 text and vocabulary", lambda: fetch(DATA))
    step("2/4 preprocess", preprocess)
    step("3/4 train, validate, save", train)
    step("4/4 reload and generate", generate)
    report(write_summary())


def step(title: str, function) -> None:
    """Announce a step and run it."""
    print(f"\n== {title}", flush=True)
    function()


def command(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run ``megatron-npu`` with this interpreter; its failure ends the demo with its exit code."""
    result = subprocess.run([sys.executable, "-m", "megatron_npu", *arguments], check=False, **options)
    if result.returncode:
        sys.exit(result.returncode)
    return result


def set_aside() -> None:
    """Move what an earlier run trained to ``runs/demo.old``."""
    if CHECKPOINT.exists():
        old = RUN.with_name("demo.old")
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
        for name in ("checkpoint", "sample.txt", "summary.json"):
            if (RUN / name).exists():
                shutil.move(RUN / name, old / name)


def preprocess() -> None:
    """Turn the text into token files, unless they are there."""
    if PREFIX.with_suffix(".idx").exists():
        print("done before")
        return
    command(
        *["preprocess", "--input", str(DATA / "corpus.jsonl"), "--output-prefix", str(DATA / "corpus")],
        *[*TOKENIZER, "--append-eod", "--workers", str(os.cpu_count() or 1)],
    )


def train() -> None:
    """Train to the last iteration; what an interrupted run saved is where it begins."""
    command(
        *["pretrain", *MODEL.split(), *TRAINING.split(), *TOKENIZER, "--data-path", str(PREFIX)],
        *["--save", str(CHECKPOINT), "--load", str(CHECKPOINT), *precision()],
    )


def precision() -> list[str]:
    """Return ``--bf16`` where the device multiplies it in hardware."""
    import torch

    if torch.cuda.is_available():
        return ["--bf16"] if torch.cuda.is_bf16_supported() else []
    return ["--bf16"] if torch.cpu._is_amx_tile_supported() else []


def generate() -> None:
    """Let the saved model go on from a prompt."""
    command(
        *["generate", "--load", str(CHECKPOINT), "--prompt", PROMPT, "--num-tokens", "120"],
        *["--temperature", "0.8", "--top-k", "40", "--output", str(RUN / "sample.txt")],
    )
    print((RUN / "sample.txt").read_text(encoding="utf-8"))


def write_summary() -> dict:
    """Write ``summary.json`` from what the driver reports; return it."""
    run = json.loads((CHECKPOINT / "summary.json").read_text(encoding="utf-8"))
    states = re.findall(r"(\d+) (applied|drifted|skipped|failed|pending)", run["ledger"])
    counts = {state: int(number) for number, state in states}
    summary = {
        "device": run["device"],
        "backend": run["backend"],
        "upstream": run["upstream"],
        "ledger": run["ledger"],
        "ledger_counts": counts,
        "parameters_without_embeddings": run["parameters_without_embeddings"],
        "iterations": run["iterations"],
        "loss_first": run["loss_first"],
        "loss_last": run["loss_last"],
        "validation_loss": run["validation_loss"],
        "tokens_per_second": run["tokens_per_second"],
        "checkpoint": relative(run["checkpoint"]),
        "plot": relative(run["plot"]),
        "sample": relative(RUN / "sample.txt"),
    }
    files.write(RUN / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def relative(path: str | Path | None) -> str | None:
    """Return a path as seen from the project's folder."""
    return None if path is None else str(Path(path).resolve().relative_to(PROJECT))


def report(summary: dict) -> None:
    """Print the summary as a table."""
    width = max(map(len, summary))
    print()
    for name, value in summary.items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        print(f"  {name:<{width}}  {shown}")
    print(f"  {'summary':<{width}}  {relative(RUN / 'summary.json')}")


if __name__ == "__main__":
    main()
