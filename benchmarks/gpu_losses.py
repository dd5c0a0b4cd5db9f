"""Compare losses on this process's device with a CPU's: the same weights and data, no dropout.

    python benchmarks/gpu_losses.py --record                  # on a CPU: the reference, minutes
    python benchmarks/gpu_losses.py --json FILE               # on a GPU: the driver and the stock script

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


@dataclass(frozen=True)
class Setup:
    """A model, and the maximum relative difference of its losses from the CPU's."""

    flags: str
    limit: float


SETUPS = {
    "small-fp32": Setup(
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
        "--max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8 --vocab-size 1023",
        1e-5,
    ),
    "345m-bf16": Setup(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1 --vocab-size 50303 --bf16",
        2e-3,
    ),
}
_LOSS = re.compile(r"lm loss: (\S+) \|")


def main() -> int:
    """Record the CPU's losses, or compare with them; return 1 if one differs too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write the reference: on a CPU")
    parser.add_argument("--only", choices=SETUPS, help="one setup")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    arguments = parser.parse_args()
    chosen = [arguments.only] if arguments.only else [*SETUPS]
    if arguments.record:
        losses = {name: {program: trained(name, program) for program in programs()} for name in chosen}
        report.write(REFERENCE, {"steps": STEPS, "losses": losses})
        return 0
    reference = json.loads(REFERENCE.read_text())["losses"]
    rows: list[dict[str, Any]] = []
    for name in chosen:
        for program in programs():
            rows.append(compared(name, program, reference[name].get(program.partition(",")[0])))
            if arguments.json:  # as they come
                report.write(arguments.json, {"rows": rows})
    return int(any(row["largest"] is None or row["largest"] > SETUPS[row["setup"]].limit for row in rows))


def programs() -> list[str]:
    """Return the built-in trainer, and the stock script if its tree exists; their losses differ."""
    graph = ["driver, one graph"] if os.environ.get("MEGATRON_NPU_DEVICE") == "cuda" else []
    return ["driver", *graph, *(["stock"] if STOCK.is_file() else [])]


def compared(name: str, program: str, reference: list[float] | None) -> dict[str, Any]:
    """Print and return a program's losses, with their largest relative difference from the CPU's."""
    losses = trained(name, program)
    pairs = zip(losses, reference or [], strict=reference is not None)
    largest = max((abs(a - b) / b for a, b in pairs), default=None)
    told = "no reference" if largest is None else f"largest distance {largest:.1e}"
    print(f"{name:12} {program:18} {told}, limit {SETUPS[name].limit:.0e}", flush=True)
    return {"setup": name, "program": program, "largest": largest, "losses": losses}


def trained(name: str, program: str) -> list[float]:
    """Return the loss of each step.

    Raises:
        RuntimeError: the program failed, or logged an unexpected number of steps.
    """
    run = [sys.executable, "-m", "megatron_npu"]
    head = ["run", str(STOCK)] if program == "stock" else ["pretrain", "--no-plot"]
    head += ["--cuda-graph-impl", "local"] if program.endswith("graph") else []
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*run, *head, *SETUPS[name].flags.split(), *COMMON.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    losses = [float(each) for each in _LOSS.findall(done.stdout)]
    if done.returncode or len(losses) != STEPS:
        raise RuntimeError(f"{program}, {name}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    return losses


if __name__ == "__main__":
    sys.exit(main())
