"""Tokens per second of data-parallel ranks on one machine, beside one process that has all its cores.

    python benchmarks/ranks.py --model demo --dtype bf16 --rounds 3

The same global batch for all: N ranks have an Nth of it and of the cores each. "sockets" leaves the
collectives to gloo (MEGATRON_NPU_SHARED_MEMORY=0), "distributed optimizer" scatters and gathers instead of
reducing everywhere. Beside the rate stands the time of processors for a step, of all ranks together; what the
kernel does for sockets beside the processes is not in it. Each variant runs in processes of its own, in turn,
round by round: quote the ratios. Needs the extra core. Results go to benchmarks/results/.
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
import train

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
    """Measure all variants, or be a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=train.MODELS, default="demo")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="measure these; write to --output alone")
    parser.add_argument("--output", type=Path, help="instead of a file in benchmarks/results/")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.child:
        be_rank(arguments)
        return
    batch = train.MODELS[arguments.model]["batch"]
    variants = arguments.only or [name for name, (ranks, *_) in VARIANTS.items() if batch % ranks == 0]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name in variants:
            one = run(name, arguments)
            found[name].append(one)
            print(
                f"{name:<37} {one['tokens_per_second']:8.1f} tokens/s, "
                f"{one['processor_ms']:7.0f} ms of processors a step",
                flush=True,
            )
    if arguments.output or not arguments.only:
        write(arguments, found)


def run(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run the ranks of a variant in fresh processes; return their rate and their processor time."""
    ranks, _, changes = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, "--model", arguments.model]
        command += ["--dtype", arguments.dtype, "--steps", str(arguments.steps), "--child", name, folder]
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        environment |= {"PYTHONWARNINGS": "ignore", **changes}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        reports = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    return {
        "tokens_per_second": next(rank["rate"] for rank in reports if rank["rate"]),
        "processor_ms": sum(rank["processor_ms"] for rank in reports),
    }


def be_rank(arguments: argparse.Namespace) -> None:
    """Train as one rank; write the rate, if this rank knows it, and the processor time of a step."""
    name, folder = arguments.child
    ranks, flags, _ = VARIANTS[name]
    model = train.MODELS[arguments.model]
    marks: list[float] = []
    more = ("--micro-batch-size", str(model["batch"] // ranks), *flags.split())
    rows = train.trained(model, arguments, more=more, on_step=lambda *_: marks.append(processor_seconds()))
    steps = [after - before for before, after in itertools.pairwise(marks)]
    rates = [row["tokens_per_second"] for row in rows[-arguments.steps :]]
    own = {
        "rate": statistics.median(rates) if rates else None,
        "processor_ms": statistics.median(steps[-arguments.steps :]) * 1e3,
    }
    (Path(folder) / os.environ["RANK"]).write_text(json.dumps(own))


def processor_seconds() -> float:
    """Return the time that processors have spent on this process, in the kernel too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write(arguments: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians and their ratios to one process, and write all with the machine as JSON."""
    from megatron_npu import upstream

    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }
    alone = medians.get(ALONE)
    ratios = {
        name: values["tokens_per_second"] / alone["tokens_per_second"]
        for name, values in medians.items()
        if alone and name != ALONE
    }
    results = {
        "model": {"name": arguments.model, **train.MODELS[arguments.model]},
        "dtype": arguments.dtype,
        "rounds": found,
        "over_one_process": ratios,
    }
    default = report.RESULTS / f"ranks-{arguments.model}-{arguments.dtype}-cpu.json"
    report.write(arguments.output or default, results, megatron_core=upstream.find().version)
    for name, ratio in ratios.items():
        print(f"{name:<37} / {ALONE} {ratio:.2f}")


if __name__ == "__main__":
    main()
