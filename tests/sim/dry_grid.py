"""Full simulated runs against dry runs of the same ranks, to the byte, on request.

    megatron-npu sim -- python -m tests.sim.dry_grid [--layout NAME ...] [--output FILE]

The driver trains two iterations of a small model in each layout: once on simulated NPUs that compute and
communicate, and once each rank alone, with nothing above 16 KiB computed. Peak and reserved memory of each
rank, as torch_npu's allocator says them, must be equal; the exit code is 1 if one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch_npu  # noqa: F401  (registers torch.npu)

from megatron_npu.base import files, settings
from megatron_npu.commands import cli  # noqa: F401  (what a rank needs, before it is forked)
from megatron_npu.planning.rank import notes, npu, peers  # noqa: F401
from megatron_npu.pretrain.run import pretrain  # noqa: F401
from megatron_npu.sim import build
from tests.support.ports import free_port

COMPUTED = 16 << 10  # bytes
BASE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --lr 1e-4 "
    "--train-iters 2 --log-interval 1 --eval-iters 0 --num-workers 0 --no-check-for-nan-in-loss-and-grad"
)
LLAMA = (
    "--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
EXPERTS = (
    f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP2, SHARED = "--context-parallel-size 2 --attention-dropout 0", "--use-distributed-optimizer"
LAYOUTS = {  # processes, words
    "gpt": (1, "--bf16"),
    "gpt-fp32": (1, ""),
    "gpt-recompute": (1, f"--bf16 {RECOMPUTE}"),
    "llama": (1, LLAMA),
    "llama-recompute": (1, f"{LLAMA} {RECOMPUTE}"),
    "experts": (1, EXPERTS),
    "gpt-tp2": (2, f"--bf16 {TP2}"),
    "gpt-tp2-recompute": (2, f"--bf16 {TP2} {RECOMPUTE}"),
    "llama-tp2-sp": (2, f"{LLAMA} {TP2} --sequence-parallel"),
    "gpt-pp2": (2, f"--bf16 {PP2}"),
    "llama-pp2-interleaved": (2, f"{LLAMA} {PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "gpt-dp2": (2, "--bf16"),
    "llama-dp2-distributed": (2, f"{LLAMA} {SHARED}"),
    "gpt-dp2-overlapped": (2, f"--bf16 {SHARED} --overlap-grad-reduce --overlap-param-gather"),
    "llama-cp2": (2, f"{LLAMA} {CP2}"),
    "llama-cp2-distributed": (2, f"{LLAMA} {CP2} {SHARED}"),
    "experts-ep2": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "experts-ep2-grouped": (2, f"{EXPERTS} --expert-model-parallel-size 2 --moe-grouped-gemm {SHARED}"),
    "llama-tp2-pp2-dp2": (8, f"{LLAMA} {TP2} --sequence-parallel {PP2} {SHARED}"),
    "llama-tp2-cp2-pp2": (8, f"{LLAMA} {TP2} --sequence-parallel {PP2} {CP2} {SHARED}"),
}


def compared(name: str, folder: Path) -> list[dict]:
    """Return of each rank of a layout its peak and reserved memory, full and dry, or the end of its log."""
    ranks, words = LAYOUTS[name]
    command = ["pretrain", *BASE.split(), *words.split(), "--global-batch-size", str(4 * ranks)]
    full = [_forked(command, folder / f"full{rank}", rank, ranks, dry=False) for rank in _numbers(ranks)]
    for child, _ in full:
        os.waitpid(child, 0)
    rows = []
    for rank in range(ranks):
        child, path = _forked(command, folder / f"dry{rank}", rank, ranks, dry=True)
        os.waitpid(child, 0)
        rows.append({"rank": rank} | _row(full[rank][1], path))
    return rows


def _numbers(ranks: int) -> Iterator[int]:
    os.environ["MASTER_PORT"] = str(free_port())
    yield from range(ranks)


def _row(full: Path, dry: Path) -> dict:
    row: dict = {}
    for kind, path in (("full", full), ("dry", dry)):
        report = json.loads(path.read_text()) if path.exists() else {"code": None}
        if report["code"] != 0:
            return {"failed": path.with_suffix(".log").read_text(errors="replace")[-1500:]}
        row[kind] = {key: report[key] for key in ("peak", "reserved", "allocations")}
        row[kind]["sent"] = sum(work["bytes"] for work in report["communication"].values())
    row["equal"] = all(row["full"][key] == row["dry"][key] for key in ("peak", "reserved"))
    return row


def _forked(command: list[str], path: Path, rank: int, ranks: int, *, dry: bool) -> tuple[int, Path]:
    """Start a rank in a fork of this process, which has imported all that it needs."""
    told = {"words": command, "output": str(path), "alone": dry}
    path.with_suffix(".spec").write_text(json.dumps(told))
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child, path
    with contextlib.suppress(BaseException):
        log = os.open(path.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {
            "RANK": rank,
            "LOCAL_RANK": 0 if dry else rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
        }
        place |= {"MASTER_ADDR": "127.0.0.1", settings.WATCHDOG.name: 0}
        os.environ.update({name: str(value) for name, value in place.items()})
        if dry:  # read when the first operation asks for it
            build.runtime_library().sim_set(b"dry", str(COMPUTED).encode())
        try:
            npu.main(str(path.with_suffix(".spec")))
        except BaseException:
            traceback.print_exc()
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {}
    if options.output and options.output.exists():
        found = json.loads(options.output.read_text())
    wrong = 0
    for name in options.layout:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found[name] = compared(name, Path(folder))
        for row in found[name]:
            wrong += not row.get("equal")
            said = row.get("failed") or f"{row['full']} {row['dry']}"
            print(f"{name:24} rank {row['rank']} {'equal' if row.get('equal') else 'NOT EQUAL'} {said}")
        print(f"{name:24} {time.monotonic() - begin:.0f} s", flush=True)
        if options.output:
            files.write(options.output, json.dumps(found, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    assert torch.npu is not None
    sys.exit(main())
