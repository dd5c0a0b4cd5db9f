"""Find the GPU kernels that take the time of a training step, and where the GPU waits, with torch's profiler.

    python benchmarks/gpu_profile.py --model gpt-345m [--graph] --json FILE

``--model bert`` profiles a step of `train`, the others one of the built-in trainer. ``milliseconds`` is a
kernel's time per step, ``idle_milliseconds`` the time per step in which no kernel runs, and ``waits`` lists
the longest of these gaps with the kernels before and after each. The profiler makes the host slower, so gaps
are longer than without it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import train
import train_hf

STEPS, BEFORE = 3, 6  # profiled, and first: a graph is captured in the fourth
WAITS = 24  # gaps that are listed
BERT = {"model": "bert", "precision": "bf16", "layers": 12, "batch": 32, "seq_length": 512}


class Profiled:
    """Profiles some steps of a training run that calls this object after each step.

    Attributes:
        begins: when each step began.
        profiler: torch's, which has the steps' kernels afterwards.
    """

    def __init__(self) -> None:
        import torch

        activity = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[activity.CPU, activity.CUDA])
        self.begins: list[float] = []

    def __call__(self, *_: object) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.begins.append(time.perf_counter())
        if len(self.begins) == BEFORE:
            self.profiler.start()
        if len(self.begins) == BEFORE + STEPS:
            self.profiler.stop()

    def seconds(self) -> float:
        """Return the seconds of a step while it was profiled."""
        return (self.begins[BEFORE + STEPS - 1] - self.begins[BEFORE - 1]) / STEPS

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of a step, the slowest first."""
        rows = [
            {
                "kernel": each.key,
                "milliseconds": each.self_device_time_total / 1e3 / STEPS,
                "calls": each.count / STEPS,
            }
            for each in self.profiler.key_averages()
            if not is_of_host(each) and "#" not in each.key  # spans, as of an optimizer's step
        ]
        return sorted(rows, key=lambda row: -row["milliseconds"])

    def waits(self) -> list[dict[str, Any]]:
        """Return the gaps between kernels, the longest first."""
        spans = sorted(
            (each.time_range.start, each.time_range.end, each.name)
            for each in self.profiler.events()
            if not is_of_host(each) and "#" not in each.name
        )
        rows, end, last = [], None, ""
        for start, stop, name in spans:
            if end is not None and start > end:
                rows.append({"milliseconds": (start - end) / 1e3, "after": last[:90], "before": name[:90]})
            if end is None or stop > end:
                end, last = stop, name
        return sorted(rows, key=lambda row: -row["milliseconds"])


def is_of_host(event: Any) -> bool:
    """Return True for an event of the profiler that is not a kernel or a copy on the GPU."""
    import torch

    return event.device_type == torch.autograd.DeviceType.CPU


def main() -> None:
    """Profile some steps; print the slowest kernels and the longest waits, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*train.MODELS, "bert"], default="gpt-345m")
    parser.add_argument("--graph", action="store_true", help="with the step as one CUDA graph, or compiled")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    profiled = Profiled()
    (step_of_bert if arguments.model == "bert" else step_of_gpt)(arguments, profiled)
    rows, waits = profiled.kernels(), profiled.waits()
    found = {
        "model": arguments.model,
        "graph": arguments.graph,
        "step_milliseconds": 1e3 * profiled.seconds(),
        "kernel_milliseconds": sum(row["milliseconds"] for row in rows),
        "idle_milliseconds": sum(row["milliseconds"] for row in waits) / STEPS,
    }
    print(json.dumps(found))
    for row in rows[:45]:
        print(f"{row['milliseconds']:9.3f} ms {row['calls']:6.0f} x  {row['kernel'][:150]}")
    for row in waits[:WAITS]:
        print(f"{row['milliseconds']:9.3f} ms idle between {row['after']} and {row['before']}")
    if arguments.json:
        found = {"device": train.device_name(), **found, "kernels": rows, "waits": waits[:WAITS]}
        report.write(arguments.json, found)


def step_of_gpt(arguments: argparse.Namespace, on_step: Callable[..., None]) -> None:
    """Train with the built-in trainer."""
    more = ("--cuda-graph-impl", "local") if arguments.graph else ()
    model = train.MODELS[arguments.model]
    train.trained(model, argparse.Namespace(dtype="bf16"), BEFORE + STEPS + 1, more, on_step)


def step_of_bert(arguments: argparse.Namespace, on_step: Callable[..., None]) -> None:
    """Train BERT as `train` does."""
    way = "ours + graph" if arguments.graph else "ours"
    options = argparse.Namespace(**BERT, one=way, steps=BEFORE + STEPS - train_hf.WARM_UP + 1)
    train_hf.measure(options, on_step)


if __name__ == "__main__":
    main()
