"""Measure the peak GPU memory in training, allocated and reserved, which `megatron-npu plan` predicts.

    python benchmarks/gpu_memory.py --json FILE

Each setup is a separate process with the built-in trainer's defaults and three steps. ``allocated`` is the
peak memory of tensors (in the allocator's blocks), ``reserved`` the peak that the allocator held, ``outside``
the additional memory of the context, the kernels and all other processes on the card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import report
import train

STEPS = 3
SETUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "345m": ("gpt-345m", ()),
    "345m full recomputation": (
        "gpt-345m",
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "345m distributed optimizer": ("gpt-345m", ("--use-distributed-optimizer",)),
    "1.3b": ("gpt-1.3b", ()),
}


def main() -> None:
    """Measure each setup, or run one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="use a small model, for a rehearsal")
    parser.add_argument(
        "--only", nargs="+", choices=SETUPS, default=[*SETUPS], help="measure only these setups"
    )
    parser.add_argument("--one", choices=SETUPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one, arguments.tiny)))
        return
    rows = []
    for name in arguments.only:
        rows.append({"setup": name, **child(name, arguments.tiny)})
        print(rows[-1], flush=True)
        if arguments.json:
            report.write(arguments.json, {"device": train.device_name(), "steps": STEPS, "rows": rows})


def child(name: str, tiny: bool) -> dict:
    """Return the measurements of a process, or the end of its output."""
    command = [sys.executable, __file__, "--one", name, *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measured(name: str, tiny: bool) -> dict[str, int]:
    """Train, and return the peaks in bytes."""
    import torch

    model, more = SETUPS[name]
    train.trained(train.MODELS["tiny" if tiny else model], argparse.Namespace(dtype="bf16"), STEPS, more)
    if not torch.cuda.is_initialized():  # a rehearsal
        return {"allocated": 0, "reserved": 0, "outside": 0}
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - reserved,
    }


if __name__ == "__main__":
    main()
