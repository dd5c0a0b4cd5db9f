"""Find the GPU kernels that take the time of a training step of the built-in trainer, with torch's profiler.

    python benchmarks/gpu_profile.py --model gpt-345m --json FILE

``milliseconds`` is a kernel's time per step. The rest of a step is the host's time, which the profiler
increases.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import report
import train

STEPS = 3


def main() -> None:
    """Profile some steps; print the slowest kernels, and write all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=train.MODELS, default="gpt-345m")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds, rows = profiled(train.MODELS[arguments.model])
    busy = sum(row["milliseconds"] for row in rows)
    found = {"model": arguments.model, "step_milliseconds": 1e3 * seconds, "kernel_milliseconds": busy}
    print(json.dumps(found))
    for row in rows[:45]:
        print(f"{row['milliseconds']:9.3f} ms {row['calls']:6.0f} x  {row['kernel'][:150]}")
    if arguments.json:
        report.write(arguments.json, {"device": train.device_name(), **found, "kernels": rows})


def profiled(model: dict[str, int]) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds of a step, and its kernels, the slowest first."""
    import time

    import torch

    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[activity.CPU, activity.CUDA])
    begins: list[float] = []

    def on_step(*_: object) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        begins.append(time.perf_counter())
        if len(begins) == train.WARM_UP + 2:
            profiler.start()
        if len(begins) == train.WARM_UP + 2 + STEPS:
            profiler.stop()

    train.trained(model, argparse.Namespace(dtype="bf16"), train.WARM_UP + STEPS + 4, (), on_step)
    rows = [
        {
            "kernel": each.key,
            "milliseconds": each.self_device_time_total / 1e3 / STEPS,
            "calls": each.count / STEPS,
        }
        for each in profiler.key_averages()
        if each.device_type != torch.autograd.DeviceType.CPU
    ]
    after = train.WARM_UP + 1 + STEPS
    return (begins[after] - begins[after - STEPS]) / STEPS, sorted(rows, key=lambda row: -row["milliseconds"])


if __name__ == "__main__":
    main()
