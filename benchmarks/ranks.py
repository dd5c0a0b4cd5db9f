"""Tokens per second of data-parallel ranks on one machine, compared with one process that has all its cores.

    python benchmarks/ranks.py --model demo --dtype bf16

The global batch is the same for all: each of N ranks gets 1/N of it and 1/N of the cores. "sockets" leaves
the collectives to gloo (MEGATRON_NPU_SHARED_MEMORY=0); "distributed optimizer" uses reduce-scatter and
all-gather instead of all-reduce. The CPU time per step over all ranks is recorded too; it does not include
the kernel's work for sockets outside the processes. Each variant runs in separate processes, and steps
alternate (``turns.py``): ratios are those of neighbouring steps. Needs the extra core. Results go to
benchmarks/results/.
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
import train
import turns

ALONE = "one process"
VARIANTS: dict[str, tuple[int, str, dict[str, str]]] = {  # ranks, flags, environment
    ALONE: (1, "", {}),
    "dp 2": (2, "", {}),
    "dp 2, sockets": (2, "", {"MEGATRON_NPU_SHARED_MEMORY": "0"}),
    "dp 2, distributed optimizer": (2, "--use-distributed-optimizer", {}),
    "dp 2, distributed optimizer, sockets": (
        2,
        "--use-distributed-optimizer",
        {"MEGATRON_NPU_SHARED_MEMORY": "0"},
    ),
    "dp 4": (4, "", {}),
    "dp 4, sockets": (4, "", {"MEGATRON_NPU_SHARED_MEMORY": "0"}),
}


def main() -> None:
    """Measure all variants, or run a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=train.MODELS, default="demo")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="number of counted steps of each variant; the variants take turns",
    )
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, help="measure only these variants, and write only to --output"
    )
    parser.add_argument(
        "--output", type=Path, help="write to this file instead of one in benchmarks/results/"
    )
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.child:
        be_rank(arguments)
        return
    batch = train.MODELS[arguments.model]["batch"]
    names = arguments.only or [name for name, (ranks, *_) in VARIANTS.items() if batch % ranks == 0]
    with tempfile.TemporaryDirectory() as folder:
        programs = [program(name, Path(folder) / str(number), arguments) for number, name in enumerate(names)]
        turns.measure(programs, arguments.steps)
        found = {
            one.name: {
                "tokens_per_second": train.rate_of(one, train.MODELS[arguments.model]),
                "processor_ms": sum(
                    json.loads(file.read_text()) for file in (Path(folder) / str(number)).iterdir()
                ),
                "step_seconds": one.seconds,
            }
            for number, one in enumerate(programs)
        }
    for name, one in found.items():
        print(
            f"{name:<37} {one['tokens_per_second']:8.1f} tokens/s, "
            f"{one['processor_ms']:7.0f} ms of processors a step",
            flush=True,
        )
    if arguments.output or not arguments.only:
        write(arguments, found, programs)


def program(name: str, folder: Path, arguments: argparse.Namespace) -> turns.Program:
    """Return the program for a variant's ranks, which write the CPU time of a step to the folder."""
    folder.mkdir()
    ranks, _, changes = VARIANTS[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, "--model", arguments.model]
    command += ["--dtype", arguments.dtype, "--steps", str(arguments.steps), "--child", name, str(folder)]
    # without torchrun's one thread a rank, which a user who sets nothing does not get either
    environment = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": None, **changes}
    return turns.Program(name, command, environment, ranks, before=train.WARM_UP)


def be_rank(arguments: argparse.Namespace) -> None:
    """Train as one rank, each step in its turn; write the median CPU time of a step."""
    name, folder = arguments.child
    ranks, flags, _ = VARIANTS[name]
    model = train.MODELS[arguments.model]
    turn, marks = turns.Turn(), []

    def take(*_: object) -> None:
        marks.append(processor_seconds())
        turn.take()

    more = ("--micro-batch-size", str(model["batch"] // ranks), *flags.split())
    train.trained(model, arguments, train.WARM_UP + arguments.steps, more, take)
    steps = [after - before for before, after in itertools.pairwise(marks)]
    (Path(folder) / os.environ["RANK"]).write_text(
        json.dumps(statistics.median(steps[-arguments.steps :]) * 1e3)
    )


def processor_seconds() -> float:
    """Return this process's CPU time, including time in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write(arguments: argparse.Namespace, found: dict[str, dict], programs: list[turns.Program]) -> None:
    """Print the ratios to one process, and write everything as JSON with a description of the machine."""
    from megatron_npu.upstream import megatrons

    alone = next((one for one in programs if one.name == ALONE), None)
    ratios = {one.name: turns.ratio(one, alone) for one in programs if alone and one is not alone}
    results = {
        "model": {"name": arguments.model, **train.MODELS[arguments.model]},
        "dtype": arguments.dtype,
        "variants": found,
        "over_one_process": ratios,
    }
    default = report.RESULTS / f"ranks-{arguments.model}-{arguments.dtype}-cpu.json"
    report.write(arguments.output or default, results, megatron_core=megatrons.find().version)
    for name, ratio in ratios.items():
        print(f"{name:<37} / {ALONE} {ratio:.2f}")


if __name__ == "__main__":
    main()
