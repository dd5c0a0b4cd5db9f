"""Latency and bandwidth of an all-reduce between processes: the simulated NPUs' HCCL compared with gloo.

    python benchmarks/hccl.py --ranks 2

The two backends take turns inside the same processes, round by round, so that changes in the machine's speed
affect both equally; quote the ratios. Bandwidth counts the bytes of one rank's buffer per second. The result
goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import report

SIZES = {"latency_4KiB_us": 4 << 10, "bandwidth_16MiB_GB_per_s": 16 << 20}
REPEATS = {4 << 10: 200, 16 << 20: 5}
ROUNDS = 15


def main() -> None:
    """Start the ranks on simulated NPUs, or run one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank, arguments.ranks, arguments.store)
        return
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_ranks(arguments.ranks, str(Path(folder) / "store"))
    write(arguments.ranks, seconds)


def run_ranks(ranks: int, store: str) -> dict[str, dict[str, list[float]]]:
    """Return rank 0's measurements: backend -> quantity -> seconds per all-reduce, one entry per round."""
    command = [sys.executable, "-m", "megatron_npu", "sim", "--devices", str(ranks), "--", "python", __file__]
    command += ["--ranks", str(ranks), "--store", store]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    return json.loads(outputs[0].strip().splitlines()[-1])


def measure(rank: int, ranks: int, store: str) -> None:
    """Run one rank; rank 0 prints the seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo")
    seconds: dict[str, dict[str, list[float]]] = {"hccl_sim": {}, "gloo": {}}
    for round_number in range(ROUNDS + 1):
        for quantity, size in SIZES.items():
            on_npu, on_cpu = torch.ones(size // 4, device="npu"), torch.ones(size // 4)
            calls: dict[str, Callable[[], object]] = {
                "hccl_sim": lambda x=on_npu: dist.all_reduce(x),
                "gloo": lambda x=on_cpu: dist.all_reduce(x, group=gloo),
            }
            for backend, call in calls.items():
                dist.barrier(gloo)
                started = time.perf_counter()
                for _ in range(REPEATS[size]):
                    call()
                    torch.npu.synchronize()
                elapsed = (time.perf_counter() - started) / REPEATS[size]
                if round_number:  # the first round warms up
                    seconds[backend].setdefault(quantity, []).append(elapsed)
    dist.barrier(gloo)
    if rank == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def write(ranks: int, seconds: dict[str, dict[str, list[float]]]) -> None:
    """Print median and spread of each quantity, and write them as JSON with a description of the machine."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for backend, quantities in seconds.items():
        for quantity, times in quantities.items():
            size = SIZES[quantity]
            values = [1e6 * t if quantity.startswith("latency") else size / t / 1e9 for t in times]
            row = {"median": statistics.median(values), "least": min(values), "most": max(values)}
            rows.setdefault(quantity, {})[backend] = {name: round(value, 4) for name, value in row.items()}
            print(
                f"{quantity:<26} {backend:<9} {row['median']:9.3f} ({row['least']:.3f} to {row['most']:.3f})"
            )
    results = {"ranks": ranks, "threads": 1, "rounds": ROUNDS, "all_reduce_fp32": rows}
    report.write(report.RESULTS / f"hccl-{ranks}-ranks.json", results)


if __name__ == "__main__":
    main()
