"""Compare losses on this process's device with a CPU's: the same weights and data, no dropout.

    python benchmarks/gpu_losses.py --record                  # on a CPU: the reference, minutes
    python benchmarks/gpu_losses.py --json FILE               # on a GPU: the driver and the stock script
    python benchmarks/gpu_losses.py --features --json FILE    # on a GPU: layers, precisions and a resume

A small GPT in fp32 is compared closely (no TF32), GPT-345M in bf16 to within bf16's rounding. Weights are
initialized on the CPU (``--use-cpu-initialization``; with rotary positions, because learned ones are not), so
both start from the same weights. The exit code is 1 if a loss differs by more than its limit. The stock
script runs if ``checkouts/core_v0.16.1`` exists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = report.RESULTS / "gpu" / "reference-losses.json"
STOCK = ROOT / "checkouts" / "core_v0.16.1" / "pretrain_gpt.py"
STEPS = 20
COMMON = (
    f"--lr 1e-4 --mock-data --train-iters {STEPS} --log-interval 1 --eval-iters 0 --eval-interval 1000 "
    "--tokenizer-type NullTokenizer --split 90,5,5 --attention-dropout 0 --hidden-dropout 0 "
    "--use-cpu-initialization --position-embedding-type rope"
)
_SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8 --vocab-size 1023"
)
_LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 2"


@dataclass(frozen=True)
class Setup:
    """A model, and the maximum relative difference of its losses from those on the CPU."""

    flags: str
    limit: float


SETUPS = {
    "small-fp32": Setup(_SMALL, 1e-5),
    "345m-bf16": Setup(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1 --vocab-size 50303 --bf16",
        2e-3,
    ),
}
# by the driver alone, with --features
FEATURES = {
    "llama-fp32": Setup(f"{_SMALL} {_LLAMA}", 1e-5),
    "llama-bf16": Setup(f"{_SMALL} {_LLAMA} --bf16", 2e-3),
    "fp16": Setup(f"{_SMALL} --fp16 --initial-loss-scale 65536", 2e-3),
    "experts-fp32": Setup(
        f"{_SMALL} {_LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2",
        1e-4,
    ),
    "grouped-experts-bf16": Setup(
        f"{_SMALL} {_LLAMA} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --bf16", 5e-3
    ),
    "latent-attention-fp32": Setup(
        f"{_SMALL} --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
        "--v-head-dim 32 --normalization RMSNorm",
        1e-5,
    ),
    "token-prediction-fp32": Setup(f"{_SMALL} --mtp-num-layers 1", 1e-5),
    "window-fp32": Setup(f"{_SMALL} --pre-tockens 64 --next-tockens 0", 1e-5),
    "window-bf16": Setup(f"{_SMALL} --pre-tockens 64 --next-tockens 0 --bf16", 2e-3),
    "recomputation-bf16": Setup(
        f"{_SMALL} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16",
        2e-3,
    ),
    "distributed-optimizer-bf16": Setup(f"{_SMALL} --use-distributed-optimizer --bf16", 2e-3),
}
RESUMED = ("llama-fp32", "fp16", "distributed-optimizer-bf16")  # also in two runs
AT_ONCE = 6  # features on one GPU
_LOSS = re.compile(r"lm loss: (\S+) \|")


def main() -> int:
    """Record the CPU's losses, or compare with them; return 1 if one differs too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="compute the reference on a CPU and write it")
    parser.add_argument("--only", choices=[*SETUPS, *FEATURES], help="run only this setup")
    parser.add_argument("--features", action="store_true", help="run the features, several at once")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    arguments = parser.parse_args()
    chosen = [arguments.only] if arguments.only else [*(FEATURES if arguments.features else SETUPS)]
    if arguments.record:
        record(chosen)
        return 0
    reference = json.loads(REFERENCE.read_text())["losses"]
    pairs = [(name, program) for name in chosen for program in programs_of(name)]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(AT_ONCE if arguments.features else 1) as pool:
        todo = [
            pool.submit(compared, name, program, reference[name].get(program.partition(",")[0]))
            for name, program in pairs
        ]
        for each in as_completed(todo):
            rows.append(each.result())
            if arguments.json:  # as they come
                report.write(arguments.json, {"rows": rows})
    return int(any(row["largest"] is None or row["largest"] > setup_of(row["setup"]).limit for row in rows))


def record(chosen: Sequence[str]) -> None:
    """Add this device's losses to the reference."""
    known = json.loads(REFERENCE.read_text())["losses"] if REFERENCE.is_file() else {}
    for name in chosen:
        plain = [program for program in programs_of(name) if "," not in program]
        known[name] = {program: trained(name, program) for program in plain}
        report.write(REFERENCE, {"steps": STEPS, "losses": known})


def setup_of(name: str) -> Setup:
    """Return a setup by its name."""
    return SETUPS.get(name) or FEATURES[name]


def programs_of(name: str) -> list[str]:
    """Return the programs that train a setup."""
    if name in SETUPS:
        return programs()
    return ["driver", *(["driver, resumed"] if name in RESUMED else [])]


def programs() -> list[str]:
    """Return the built-in trainer, and the stock script if its tree exists; their losses differ."""
    graph = ["driver, one graph"] if os.environ.get("MEGATRON_NPU_DEVICE") == "cuda" else []
    return ["driver", *graph, *(["stock"] if STOCK.is_file() else [])]


def compared(name: str, program: str, reference: list[float] | None) -> dict[str, Any]:
    """Print and return a program's losses, with their largest relative difference from the CPU's."""
    try:
        losses = trained(name, program)
    except RuntimeError as error:  # one does not end the others
        print(error, flush=True)
        return {"setup": name, "program": program, "largest": None, "losses": [], "failed": str(error)[-600:]}
    pairs = zip(losses, reference or [], strict=reference is not None)
    largest = max((abs(a - b) / b for a, b in pairs), default=None)
    told = "no reference" if largest is None else f"largest distance {largest:.1e}"
    print(f"{name:26} {program:18} {told}, limit {setup_of(name).limit:.0e}", flush=True)
    return {"setup": name, "program": program, "largest": largest, "losses": losses}


def trained(name: str, program: str) -> list[float]:
    """Return the loss of each step.

    Raises:
        RuntimeError: the program failed, or logged an unexpected number of steps.
    """
    run = [sys.executable, "-m", "megatron_npu"]
    head = ["run", str(STOCK)] if program == "stock" else ["pretrain", "--no-plot"]
    head += ["--cuda-graph-impl", "local"] if program.endswith("graph") else []
    command = [*run, *head, *setup_of(name).flags.split(), *COMMON.split()]
    parts: list[list[str]] = [[]]
    if program.endswith("resumed"):  # ends after half of the steps, and goes on in a new process
        parts = [["--save", "saved", "--exit-interval", str(STEPS // 2)], ["--load", "saved"]]
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for more in parts:
            losses += run_of([*command, *more], folder)
    if len(losses) != STEPS:
        raise RuntimeError(f"{program}, {name}: {len(losses)} losses, but {STEPS} were expected")
    return losses


def run_of(command: list[str], folder: str) -> list[float]:
    """Run a training program, and return the losses that it logs.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    return [float(each) for each in _LOSS.findall(done.stdout)]


if __name__ == "__main__":
    sys.exit(main())
