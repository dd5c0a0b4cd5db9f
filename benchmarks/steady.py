"""Seconds per step of a run before and after it saves, evaluates and resumes: does it get slower?

    python benchmarks/steady.py --dtype bf16

A run of the built-in trainer saves (or evaluates) after every ``--steps`` steps; then the same run is resumed
for some more steps. A second run, which never does, takes its steps in turn with it (``turns.py``): each step
is compared with its neighbour, because the machine's speed drifts by more than the difference to be detected.
For each stretch between two events, the results are the median of these ratios, and the voluntary context
switches and the CPU time per step, which other processes on the machine affect less: a thread that sleeps at
the end of every parallel region shows up in the switches first, one that spins in the time. "uncured" omits
``gloo.copy_with_one_thread``. Needs the extra core. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path

import report
import turns

MODEL = {"layers": 6, "hidden": 320, "heads": 5, "seq": 256, "batch": 4}
VOCABULARY = 50304
VARIANTS = ("project", "uncured")
EVENTS = ("save", "evaluation")
WARM_UP = 2  # steps of a process that do not count


def main() -> None:
    """Measure all variants and events, or run one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=15, help="number of steps between two events")
    parser.add_argument("--events", type=int, default=5, help="number of events of each kind")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--child", nargs=4, metavar=("VARIANT", "EVENT", "FOLDER", "ITERATIONS"))
    arguments = parser.parse_args()
    if arguments.child:
        variant, event, folder, iterations = arguments.child
        print(json.dumps(train(variant, event, Path(folder), int(iterations), arguments)))
        return
    measured = {
        variant: {event: stretches(variant, event, arguments) for event in EVENTS}
        for variant in arguments.variants
    }
    write(arguments, measured)


def stretches(variant: str, event: str, arguments: argparse.Namespace) -> list[dict]:
    """Return the stretches of a run and of its resumption, each compared with a run without events."""
    end = arguments.steps * (arguments.events + 1)
    with tempfile.TemporaryDirectory() as folder:
        found = beside_another(variant, event, Path(folder), range(end), arguments)
        if event == "save":
            found += beside_another(
                variant, event, Path(folder), range(end, end + arguments.steps), arguments
            )
    for stretch in found:
        name = "resumed" if stretch["resumed"] else f"after {stretch['events']}"
        print(
            f"{variant:<8} {event:<11} {name:<8} {stretch['ratio']:6.3f} of the run beside it, "
            f"{stretch['processor_ms']:8.1f} ms of processors, {stretch['switches']:8.0f} switches",
            flush=True,
        )
    return found


def beside_another(
    variant: str, event: str, folder: Path, iterations: range, arguments: argparse.Namespace
) -> list[dict]:
    """Run these iterations in turn with a run without events; return the stretches."""
    runs = [
        turns.Program(name, command_of(variant, name, where, last, arguments), before=WARM_UP)
        for name, where, last in (
            (event, folder, iterations.stop),
            ("none", folder / "none", len(iterations)),
        )
    ]
    turns.measure(runs, len(iterations) - WARM_UP)
    one, other = runs
    ratios = turns.ratios(other, one)
    # the turn after iteration n ends in the midst of the next one: it has what happens after n in it
    after = list(iterations)[WARM_UP - 1 : -1]
    rows = zip((number + 1 for number in after), ratios, one.said[WARM_UP:], strict=True)
    calm = [row for row in rows if row[0] % arguments.steps]
    stretches = itertools.groupby(calm, key=lambda row: row[0] // arguments.steps)
    return [medians(list(own), events, iterations.start > 0) for events, own in stretches]


def medians(rows: list, events: int, resumed: bool) -> dict:
    """Summarize a stretch, given rows of iteration, ratio, context switches and CPU time."""
    return {
        "events": events,
        "resumed": resumed,
        "ratio": statistics.median(ratio for _, ratio, _ in rows),
        "switches": statistics.median(switches for *_, (switches, _) in rows),
        "processor_ms": statistics.median(milliseconds for *_, (_, milliseconds) in rows),
    }


def command_of(variant: str, event: str, folder: Path, last: int, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a run that ends after iteration ``last``."""
    command = [sys.executable, __file__, "--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    return [*command, "--child", variant, event, str(folder), str(last)]


def train(variant: str, event: str, folder: Path, last: int, arguments: argparse.Namespace) -> list:
    """Train, each step in its turn; return the context switches and CPU milliseconds of each step."""
    from megatron_npu.devices import gloo
    from megatron_npu.pretrain.flags import arguments as flags
    from megatron_npu.pretrain.run import pretrain

    if variant == "uncured":
        gloo.copy_with_one_thread = lambda: None
    options = {
        "num-layers": MODEL["layers"],
        "hidden-size": MODEL["hidden"],
        "num-attention-heads": MODEL["heads"],
        "seq-length": MODEL["seq"],
        "max-position-embeddings": MODEL["seq"],
        "micro-batch-size": MODEL["batch"],
        "global-batch-size": MODEL["batch"],
        "train-iters": 10**4,
        "exit-interval": last,
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY - 1,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "eval-iters": 2 if event == "evaluation" else 0,
        "eval-interval": arguments.steps,
        "log-interval": 1,
    }
    if event == "save":
        options |= {"save": folder, "load": folder, "save-interval": arguments.steps}
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    argv += ["--mock-data", "--no-plot", *(["--bf16"] if arguments.dtype == "bf16" else [])]
    turn, begun, used = turns.Turn(), usage(), []

    def take(*_: object) -> None:
        nonlocal begun
        used.append([now - before for now, before in zip(usage(), begun, strict=True)])
        turn.take()
        begun = usage()

    with open(os.devnull, "w") as quiet:
        out, sys.stdout = sys.stdout, quiet
        try:
            pretrain.train(flags.parse(argv), take)
        finally:
            sys.stdout = out
    return used


def usage() -> tuple[int, float]:
    """Return this process's voluntary context switches and CPU milliseconds so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw, (used.ru_utime + used.ru_stime) * 1e3


def write(arguments: argparse.Namespace, measured: dict) -> None:
    """Print the ratio of the later stretches to the first, and write everything as JSON."""
    from megatron_npu.upstream import megatrons

    ratios, processor_ratios = (
        after_over_before(measured, "ratio"),
        after_over_before(measured, "processor_ms"),
    )
    results = {
        "model": MODEL,
        "dtype": arguments.dtype,
        "stretches": measured,
        "after_over_before": ratios,
        "processor_after_over_before": processor_ratios,
    }
    report.write(
        report.RESULTS / f"steady-{arguments.dtype}-cpu.json", results, megatron_core=megatrons.find().version
    )
    for name, ratio in ratios.items():
        print(f"after / before, {name:<20} {ratio:.3f}, of processor time {processor_ratios[name]:.3f}")


def after_over_before(measured: dict, key: str) -> dict[str, float]:
    """Return for each variant and event the median of the later stretches, relative to the first one."""
    return {
        f"{variant}, {event}": statistics.median(one[key] for one in run[1:]) / run[0][key]
        for variant, events in measured.items()
        for event, run in events.items()
    }


if __name__ == "__main__":
    main()
