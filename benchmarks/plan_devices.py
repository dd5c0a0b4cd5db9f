"""The same plans for NPUs and for CUDA: how far the simulation of CUDA's allocator is from torch_npu's own.

    python -m benchmarks.plan_devices [--layout NAME ...] --output FILE
    python -m tests.sim.dry_record            # docs/records/plan.md from benchmarks/results/plan/devices.json

Runs ``megatron-npu plan --device npu`` and ``--device cuda`` for each layout of ``LAYOUTS`` and compares the
allocations of the fullest rank that are alive at its peak. Some operations allocate other tensors on the two
devices (``DIFFERENT``); their blocks without an equally large one on the other device are told separately,
and the rest is compared by itself. The exit code is 1 if the rest differs by more than 2 % in a layout.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from tests.support import layout_words
from tests.support.layout_words import EP2, EXPERTS, FREE_EXPERTS, PP2, RECOMPUTE, SEQUENCE, SHARED, TP2

ROOT = Path(__file__).resolve().parents[1]
_CHECKOUTS = ROOT / "checkouts"
MOST = 2.0  # per cent
SIZES = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 2 --vocab-size 32000 --lr 1e-4 --train-iters 10 "
    "--eval-iters 0 --mock-data --tokenizer-type NullTokenizer"
)
_LLAMA = f"{layout_words.LLAMA} 4 --attention-dropout 0 --hidden-dropout 0"
_EXPERTS = f"{_LLAMA} {EXPERTS} --moe-grouped-gemm"
_FREE = f"{_LLAMA} {FREE_EXPERTS} --moe-grouped-gemm {EP2}"  # without a capacity
_UNEVEN = "--expert-imbalance 1.5"  # of the plan
LAYOUTS: dict[
    str, tuple[str, int, str]
] = {  # program, devices, words: a plan's, --, a job's; no program: the driver, 0.16.1
    "gpt": ("", 1, "--bf16"),
    "gpt-tp2": ("", 2, f"--bf16 {TP2}"),
    "llama": ("", 1, _LLAMA),
    "llama-recompute": ("", 1, f"{_LLAMA} {RECOMPUTE}"),
    "llama-tp2-sp": ("", 2, f"{_LLAMA} {SEQUENCE}"),
    "llama-pp2": ("", 2, f"{_LLAMA} {PP2}"),
    "llama-dp2-distributed": ("", 2, f"{_LLAMA} {SHARED}"),
    "experts-ep2": ("", 2, f"{_EXPERTS} {EP2}"),
    "experts-ep2-free": ("", 2, _FREE),
    "experts-ep2-uneven": ("", 2, f"{_UNEVEN} -- {_FREE}"),
    "experts-ep2-allgather": ("", 2, _FREE.replace("alltoall", "allgather")),
    "megatron_core-0.17.1/experts-ep2-uneven": ("megatron_core-0.17.1", 2, f"{_UNEVEN} -- {_FREE}"),
    "megatron_core-0.18.2/experts-ep2-uneven": ("megatron_core-0.18.2", 2, f"{_UNEVEN} -- {_FREE}"),
    "megatron_core-0.19.2/llama": ("megatron_core-0.19.2", 1, _LLAMA),
    "megatron_core-0.19.2/experts": ("megatron_core-0.19.2", 1, _EXPERTS),
    "megatron_core-0.19.2/experts-ep2-uneven": ("megatron_core-0.19.2", 2, f"{_UNEVEN} -- {_FREE}"),
    "core_v0.16.1/gpt": ("core_v0.16.1", 1, "--bf16"),
    "core_v0.16.1/llama-tp2-sp": ("core_v0.16.1", 2, f"{_LLAMA} {SEQUENCE}"),
    "core_v0.19.0/llama": ("core_v0.19.0", 1, _LLAMA),
}
# operations that allocate other tensors on NPUs than on CUDA, by the file or the operation that allocates
DIFFERENT = {
    "cuBLAS": ("cuBLAS's workspace",),
    "attention": ("attention/npu.py", "attention/cuda.py"),
    "residual norm": ("/dropout.py", "/residual.py", "/draws.py", "/residual_norm.py"),
}


def planned(program: str, devices: int, words: str, device: str, folder: Path) -> dict[str, Any]:
    """Return the plan of a job on a device: its report, and the ``live`` bytes of the fullest rank's peak."""
    environment, start = dict(os.environ), ["pretrain"]
    if program:
        tree = _CHECKOUTS / program
        environment["MEGATRON_LM_PATH"] = str(tree)
        if (tree / "pretrain_gpt.py").exists():
            start = [str(tree / "pretrain_gpt.py")]
        else:
            listed = [str(tree), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, listed))
    report, timeline = folder / f"{device}.json", folder / f"{device}.pickle"
    command = [sys.executable, "-m", "megatron_npu", "plan", "--devices", str(devices), "--device", device]
    options, _, job = words.rpartition(" -- ")
    command += [
        "--json",
        str(report),
        "--timeline",
        str(timeline),
        *options.split(),
        "--",
        *start,
        *job.split(),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    ranks = json.loads(report.read_text())["ranks"]
    fullest = max(ranks, key=lambda rank: rank["reserved"] + rank["buffers"])
    return {"ranks": ranks, "fullest": fullest, "live": live(pickle.loads(timeline.read_bytes()))}


def live(snapshot: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the blocks alive at the peak: bytes, and the name in ``DIFFERENT`` of what allocated them."""
    (events,) = [trace for trace in snapshot["device_traces"] if trace]
    now = most = 0
    alive: dict[int, Mapping[str, Any]] = {}
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            now += event["size"]
            if now > most:
                most, kept = now, list(alive.values())
        elif event["action"] == "free_requested" and event["addr"] in alive:
            now -= alive.pop(event["addr"])["size"]
    return sorted((event["size"], _owner(event)) for event in kept)


def unpaired(own: list[tuple[int, str]], other: list[tuple[int, str]]) -> dict[str, int]:
    """Return the bytes of blocks without an equally large one on the other device, by what allocated them.

    Equally large means within 0.5 %, because the two allocators round differently. Of equally large blocks,
    those of the operations in ``DIFFERENT`` are taken to be the ones without a partner.
    """
    found = Counter(dict.fromkeys(DIFFERENT, 0))
    partners = [size for size, _ in other]
    for size, owner in sorted(own, key=lambda block: (block[1] != "", block[0])):
        near = next((each for each in partners if abs(each - size) <= 0.005 * size + 512), None)
        if near is not None:
            partners.remove(near)
        elif owner:
            found[owner] += size
    return dict(found)


def _owner(event: Mapping[str, Any]) -> str:
    lines = [f"{frame['filename']} {frame['name']}" for frame in event["frames"][:6]]
    for name, parts in DIFFERENT.items():
        if any(part in line for part in parts for line in lines):
            return name
    return ""


def compared(program: str, devices: int, words: str, sizes: str = SIZES) -> dict[str, Any]:
    """Return the peaks of a layout's fullest rank on both devices, and their differences in per cent."""
    batch = f"--global-batch-size {4 * (2 if SHARED in words or EP2 in words else 1)}"
    with tempfile.TemporaryDirectory() as folder:
        npu, cuda = (
            planned(program, devices, f"{words} {sizes} {batch}", device, Path(folder))
            for device in ("npu", "cuda")
        )
    held = {"npu": unpaired(npu["live"], cuda["live"]), "cuda": unpaired(cuda["live"], npu["live"])}
    row = {
        "npu": npu["fullest"]["peak"],
        "cuda": cuda["fullest"]["peak"],
        "reserved": [each["fullest"]["reserved"] for each in (npu, cuda)],
        "held": {name: [held["npu"][name], held["cuda"][name]] for name in DIFFERENT},
        "rest": [
            npu["fullest"]["peak"] - sum(held["npu"].values()),
            cuda["fullest"]["peak"] - sum(held["cuda"].values()),
        ],
        "without_triton": cuda["fullest"]["without_triton"],
    }
    row["differ"] = _per_cent(row["npu"], row["cuda"])
    row["rest_differ"] = _per_cent(*row["rest"])
    return row


def _per_cent(first: int, second: int) -> float:
    return round(100 * (second / first - 1), 2)


def lines(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the part of docs/records/plan.md about the two devices."""
    many = sum(abs(row["rest_differ"]) <= MOST for row in found.values())
    pairs = dict.fromkeys((row["day"], row["commit"]) for row in found.values())
    said = [
        "## CUDA against NPU",
        "",
        "`python -m benchmarks.plan_devices` plans each layout (8 layers, hidden size 1,024, 1,024 tokens)",
        "with `--device npu` and `--device cuda` (triton installed) and compares the fullest rank. Three",
        "operations allocate other tensors on the two devices. Bytes that only one of them has at its peak",
        "are in columns of their own, first NPU, then CUDA: cuBLAS has a workspace of 32 MiB for each thread",
        "that multiplies; attention saves more statistics of its softmax on an NPU; the fused residual norm",
        "saves more on an NPU, with dropout its mask, where CUDA saves a seed. The rest must be within 2 %.",
        f"{'; '.join(f'{day}, commit {commit}' for day, commit in pairs)}: {many} of {len(found)} are.",
        "",
        "| layout | NPU, bytes | CUDA, bytes | differ | cuBLAS, MB | attention, MB | residual norm, MB | "
        "rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        held = " | ".join(f"{npu / 1e6:.1f}, {cuda / 1e6:.1f}" for npu, cuda in row["held"].values())
        said.append(
            f"| {name} | {row['npu']:,} | {row['cuda']:,} | {row['differ']:+.2f} % | {held} | "
            f"{row['rest_differ']:+.2f} % |"
        )
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    stamp = {"day": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "commit": commit}
    wrong = 0
    for name in options.layout:
        row = compared(*LAYOUTS[name]) | stamp
        wrong += abs(row["rest_differ"]) > MOST
        print(name, row, flush=True)
        found = json.loads(options.output.read_text()) if options.output.exists() else {}
        found[name] = row
        listed = {each: found[each] for each in LAYOUTS if each in found}
        files.write(options.output, json.dumps(listed, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
