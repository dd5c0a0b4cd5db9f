"""Seconds per step of a run before and after it saves, evaluates and resumes: does it get slower?

    python benchmarks/steady.py --dtype bf16 --rounds 3

One run of the embedded driver per variant, with a save or an evaluation after every ``--steps`` steps, then
the same run resumed. Beside the median time of the steps of each stretch stand the voluntary context switches
and the processor time per step, which other processes on the machine disturb less: a thread that sleeps at
the end of every parallel region shows in the switches first, one that waits awake in the time. "uncured"
leaves ``gloo.copy_with_one_thread`` out. Needs the extra core. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import report

MODEL = {"layers": 6, "hidden": 320, "heads": 5, "seq": 256, "batch": 4}
VOCABULARY = 50304
VARIANTS = ("project", "uncured")
EVENTS = ("save", "evaluation")


def main() -> None:
    """Measure all variants and events, or one run (in a child)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=15, help="in each stretch between two events")
    parser.add_argument("--events", type=int, default=5, help="how many of a kind")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each variant and kind, in turn")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--child", nargs=4, metavar=("VARIANT", "EVENT", "FOLDER", "ITERATIONS"))
    arguments = parser.parse_args()
    if arguments.child:
        variant, event, folder, iterations = arguments.child
        print(json.dumps(train(variant, event, Path(folder), int(iterations), arguments)))
        return
    measured: dict = {variant: {event: [] for event in EVENTS} for variant in arguments.variants}
    for _ in range(arguments.rounds):
        for variant, events in measured.items():
            for event, runs in events.items():
                runs.append(both_runs(variant, event, arguments))
    write(arguments, measured)


def both_runs(variant: str, event: str, arguments: argparse.Namespace) -> list[dict]:
    """Return the stretches of a run, and of its resumption, each with a process of its own."""
    end = arguments.steps * (arguments.events + 1)
    with tempfile.TemporaryDirectory() as folder:
        stretches = run_child(variant, event, folder, end, arguments)
        if event == "save":
            resumed = run_child(variant, event, folder, end + arguments.steps, arguments)
            stretches += [{**stretch, "resumed": True} for stretch in resumed]
    for number, stretch in enumerate(stretches):
        name = "resumed" if stretch.get("resumed") else f"after {number}"
        print(
            f"{variant:<8} {event:<11} {name:<8} {stretch['ms']:8.1f} ms, "
            f"{stretch['processor_ms']:8.1f} ms of processors, {stretch['switches']:8.0f} switches",
            flush=True,
        )
    return stretches


def run_child(variant: str, event: str, folder: str, iterations: int, arguments: argparse.Namespace) -> list:
    """Run the driver in a fresh process; return its stretches."""
    command = [sys.executable, __file__, "--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    command += ["--child", variant, event, folder, str(iterations)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.strip().splitlines()[-1])


def train(variant: str, event: str, folder: Path, iterations: int, arguments: argparse.Namespace) -> list:
    """Train; return each stretch's first step, median milliseconds, switches and processor time per step."""
    from megatron_npu.devices import gloo
    from megatron_npu.training import arguments as flags
    from megatron_npu.training import pretrain

    if variant == "uncured":
        gloo.copy_with_one_thread = lambda: None
    log = folder / "metrics.jsonl"
    options = {
        "num-layers": MODEL["layers"],
        "hidden-size": MODEL["hidden"],
        "num-attention-heads": MODEL["heads"],
        "seq-length": MODEL["seq"],
        "max-position-embeddings": MODEL["seq"],
        "micro-batch-size": MODEL["batch"],
        "global-batch-size": MODEL["batch"],
        "train-iters": 100 * arguments.steps,
        "exit-interval": iterations,
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY - 1,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "eval-iters": 2 if event == "evaluation" else 0,
        "eval-interval": arguments.steps,
        "log-interval": 1,
        "json-log": log,
        "save": folder / "checkpoints",
        "load": folder / "checkpoints",
    }
    if event == "save":
        options["save-interval"] = arguments.steps
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    argv += ["--mock-data", "--no-plot", *(["--bf16"] if arguments.dtype == "bf16" else [])]
    marks: dict[int, tuple[int, float]] = {}  # context switches and milliseconds of processors so far

    def count(iteration: int, _: object) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        marks[iteration] = used.ru_nvcsw, (used.ru_utime + used.ru_stime) * 1e3

    with open(os.devnull, "w") as quiet:
        out, sys.stdout = sys.stdout, quiet
        try:
            pretrain.train(flags.parse(argv), count)
        finally:
            sys.stdout = out
    return list(stretches_of(log, marks, arguments.steps))


def stretches_of(log: Path, marks: dict[int, tuple[int, float]], steps: int):
    """Yield what ``train`` returns; the first two steps of a process are left out."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    times = {row["iteration"]: row["elapsed_ms"] for row in rows if "elapsed_ms" in row}
    begin = min(marks)
    kept = [i for i in sorted(marks) if i in times and i >= begin + 2]
    for first, group in itertools.groupby(kept, key=lambda i: (i - 1) // steps):
        own = list(group)
        pairs = [(i, i + 1) for i in own if i + 1 in own]
        if pairs:
            yield {
                "first_step": first * steps + 1,
                "ms": statistics.median(times[i] for i in own),
                "switches": statistics.median(marks[b][0] - marks[a][0] for a, b in pairs),
                "processor_ms": statistics.median(marks[b][1] - marks[a][1] for a, b in pairs),
            }


def write(arguments: argparse.Namespace, measured: dict) -> None:
    """Print the ratio of the slowest later stretch to the first, and write all as JSON."""
    from megatron_npu import upstream

    ratios, processor_ratios = after_over_before(measured, "ms"), after_over_before(measured, "processor_ms")
    results = {
        "model": MODEL,
        "dtype": arguments.dtype,
        "stretches": measured,
        "after_over_before": ratios,
        "processor_after_over_before": processor_ratios,
    }
    report.write(
        report.RESULTS / f"steady-{arguments.dtype}-cpu.json", results, megatron_core=upstream.find().version
    )
    for name, ratio in ratios.items():
        print(f"after / before, {name:<20} {ratio:.2f}, of processor time {processor_ratios[name]:.2f}")


def after_over_before(measured: dict, key: str) -> dict[str, float]:
    """Return for each variant and event the median of the later stretches, of that of the first ones.

    Before its first event a run has one stretch, whose median wavers by some percent: hence several rounds.
    """
    return {
        f"{variant}, {event}": statistics.median(one[key] for run in runs for one in run[1:])
        / statistics.median(run[0][key] for run in runs)
        for variant, events in measured.items()
        for event, runs in events.items()
    }


if __name__ == "__main__":
    main()
