"""Run everything that needs a GPU, on a machine that has one: make gpu.

    python benchmarks/gpu_day.py [PIECE ...] [--dry-run] [--rehearse]

A piece is a few commands that finish within four minutes, or are ended then; each piece can be run
separately, the most informative first. Their output goes to benchmarks/results/gpu/PIECE.log, their
measurements to JSON files beside it, and scripts/gpu_page.py writes docs/records/gpu.md from all of them. A
piece that fails does not stop the others; the exit code shows it. ``--together`` first runs the pieces that
measure no time, all at once, and then the others, because time on a borrowed machine is short. Without a GPU
only ``--dry-run``, which prints the commands, and ``--rehearse`` work. The latter runs them on the CPU with
small sizes in a separate folder: it shows that they start, but measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LIMIT, REHEARSAL_LIMIT = 4 * 60.0, 60 * 60.0  # seconds of a piece; a CPU may be slow, and have other work
TREES = ("core_v0.16.1", "core_v0.12.1", "285068c8")  # whose stock scripts run, where checkouts/ has them
SUITES = ("mixed-precision", "sharding", "3d", "graph")  # the tables of document 001
_NO_GPU, LATE, BEYOND = 2, 124, 125
WRONG = re.compile(rb"comparisons, [1-9]\d* above the limit")  # as verify mode tells, which ends no run
# a vocabulary of bytes and documents that count up, as the tests have them
WRITE_DATA = """
import sys
from pathlib import Path
from tests.support import stock_lm as runs
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
runs.write_vocabulary(folder)
runs.write_dataset(folder / "text")
"""
LEGACY = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --train-iters 20 --lr-decay-iters 20 "
    "--log-interval 1 --eval-iters 1 --eval-interval 1000 --split 90,5,5 --num-workers 0 --bf16 "
    "--vocab-file {0}/vocab.json --merge-file {0}/merges.txt --data-path {0}/text"
)
_TINY_MODEL = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
_MODEL = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"


@dataclass(frozen=True)
class Day:
    """Settings that determine how the pieces are run.

    Attributes:
        rehearsal: whether they run on the CPU with small sizes.
        results: the folder for their files.
        limit: maximum seconds per piece.
    """

    rehearsal: bool
    results: Path
    limit: float = LIMIT

    @property
    def device(self) -> str:
        """The device, in the form used by MEGATRON_NPU_DEVICE."""
        return "cpu" if self.rehearsal else "cuda"


Command = list[str]
PYTHON = sys.executable


def tests(day: Day) -> list[Command]:
    """Compare every operation with fp64 on the device, and check properties of torch that we rely on."""
    files = (
        ["tests/ops/test_norm.py"]
        if day.rehearsal
        else ["tests/ops", "tests/unit/devices/test_torch_itself.py", "-n", "8"]
    )
    pytest = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return [[*pytest, *files, "-k", day.device], [PYTHON, "-m", "megatron_npu", "doctor"]]


def model_flags(day: Day, iterations: int) -> list[str]:
    """Return the flags of a GPT with mock data, in bf16."""
    sizes = _TINY_MODEL if day.rehearsal else _MODEL
    words = (
        f"{sizes} --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 1e-4 "
        f"--mock-data --train-iters {iterations} --log-interval 1 --eval-iters 1 --eval-interval 1000 --bf16 "
        "--tokenizer-type NullTokenizer --vocab-size 1023 --split 90,5,5"
    )
    return words.split()


def stock_scripts(day: Day) -> list[Command]:
    """Run the built-in trainer, and the unedited stock scripts of the available trees."""
    run, iterations = [PYTHON, "-m", "megatron_npu"], 2 if day.rehearsal else 20
    flags = model_flags(day, iterations)
    commands = [[*run, "pretrain", *flags, "--no-plot"]]
    for name in TREES[:1] if day.rehearsal else TREES:
        tree = ROOT / "checkouts" / name
        if not tree.is_dir():
            print(f"gpu: no {tree.relative_to(ROOT)}: its scripts do not run (make megatron)")
        elif name.startswith("core"):
            commands.append([*run, "run", str(tree / "pretrain_gpt.py"), *flags])
        else:  # it makes up no data
            data = str(day.results / "counting")
            commands.append([PYTHON, "-c", WRITE_DATA, data])
            commands.append([*run, "run", str(tree / "pretrain_gpt.py"), *LEGACY.format(data).split()])
    return commands


def verify(day: Day) -> list[Command]:
    """Train while comparing each operation with its reference, forward and backward."""
    flags = model_flags(day, 2 if day.rehearsal else 10)
    return [["env", "MEGATRON_NPU_VERIFY=all", PYTHON, "-m", "megatron_npu", "pretrain", *flags, "--no-plot"]]


def losses(day: Day) -> list[Command]:
    """Compare losses of twenty steps with a CPU's: trainer and stock script in fp32, 345M in bf16."""
    names = ["small-fp32"] if day.rehearsal else ["small-fp32", "345m-bf16"]
    script = [PYTHON, "benchmarks/gpu_losses.py"]
    return [[*script, "--only", name, "--json", str(day.results / f"losses-{name}.json")] for name in names]


def features(day: Day) -> list[Command]:
    """Compare losses with a CPU's for more layers and precisions, and across a resume."""
    chosen = ["--only", "llama-fp32"] if day.rehearsal else ["--features"]
    return [
        [PYTHON, "benchmarks/gpu_losses.py", *chosen, "--json", str(day.results / "losses-features.json")]
    ]


def memory(day: Day) -> list[Command]:
    """Measure the peaks of allocated and reserved memory that `megatron-npu plan` predicts."""
    tiny = ["--tiny"] if day.rehearsal else []
    return [[PYTHON, "benchmarks/gpu_memory.py", *tiny, "--json", str(day.results / "memory.json")]]


def bert(day: Day) -> list[Command]:
    """Compare BERT's training steps by `train` with Transformers' Trainer, with and without graphs."""
    sizes = "--layers 1 --batch 1 --seq-length 16 --steps 2" if day.rehearsal else "--batch 32 --steps 20"
    ways = ["--ways", "trainer", "ours"] if day.rehearsal else []
    output = ["--json", str(day.results / "train-bert.json")]
    return [[PYTHON, "benchmarks/train_hf.py", *sizes.split(), *output, *ways]]


def profile(day: Day) -> list[Command]:
    """Find the kernels that take most of the time in a step, and how long the GPU waits between them."""
    models = [["tiny"]] if day.rehearsal else [["gpt-345m", "--graph"], ["bert"], ["bert", "--graph"]]
    script = [PYTHON, "benchmarks/gpu_profile.py", "--model"]
    return [
        [*script, *model, "--json", str(day.results / f"kernels-{''.join(model).replace('--', '-')}.json")]
        for model in models
    ]


def operations(day: Day) -> list[Command]:
    """Compare each operation with flash-attn, cuDNN, Liger and torch.compile."""
    small = ["--tiny", "--repeat", "1", "--only", "norm"] if day.rehearsal else []
    output = ["--output", str(day.results / "operations.json")]
    return [[PYTHON, "benchmarks/gpu_ops.py", *small, *output]]


def steps(model: str) -> Callable[[Day], list[Command]]:
    """Return the piece that trains a model with the built-in trainer and with nanoGPT's code, compiled."""

    def piece(day: Day) -> list[Command]:
        size = "tiny" if day.rehearsal else model
        variants = [
            "project",
            "project, one graph",
            *(["nanogpt"] if day.rehearsal else ["nanogpt compiled", "floor"]),
        ]
        count = ["--together", "1", "--steps", "2" if day.rehearsal else "10"]  # a GPU holds one
        line = [
            PYTHON,
            "benchmarks/train.py",
            "--model",
            size,
            "--dtype",
            "bf16",
            *count,
            "--only",
            *variants,
        ]
        return [[*line, "--output", str(day.results / f"train-{model}.json")]]

    piece.__doc__ = (
        f"Whole steps of {model} in bf16 beside nanoGPT's under torch.compile: tokens/s, MFU, memory."
    )
    return piece


def tables(*suites: str) -> Callable[[Day], list[Command]]:
    """Return the piece that measures some of document 001's tables."""

    def piece(day: Day) -> list[Command]:
        count = "--devices 1 --steps 1 --repeat 2" if day.rehearsal else "--devices 1 --steps 5 --repeat 3"
        tiny = "--model 2x32x4 --seq-length 16 --vocab-size 256 --micro-batch-size 2" if day.rehearsal else ""
        bench = [PYTHON, "-m", "megatron_npu", "bench", *count.split(), *tiny.split()]
        return [
            [*bench, "--suite", suite, "--json", str(day.results / f"bench-{suite}.json")] for suite in suites
        ]

    piece.__doc__ = f"Tables of document 001: {', '.join(suites)}."
    return piece


PIECES: dict[str, Callable[[Day], list[Command]]] = {
    "tests": tests,
    "verify": verify,
    "losses": losses,
    "features": features,
    "stock-scripts": stock_scripts,
    "gpt-345m": steps("gpt-345m"),
    "gpt-1.3b": steps("gpt-1.3b"),
    "bert": bert,
    "memory": memory,
    "profile": profile,
    "operations": operations,
    "tables": tables(*SUITES[:2]),
    "more-tables": tables(*SUITES[2:]),
}
UNTIMED = (
    "tests",
    "verify",
    "losses",
    "features",
    "stock-scripts",
    "memory",
)  # what others on the machine cannot make wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run pieces; return 0 if all succeeded, 1 if one failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=", ".join(PIECES))
    parser.add_argument("--dry-run", action="store_true", help="print the commands without running them")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU with small sizes")
    parser.add_argument(
        "--together", action="store_true", help="first run the pieces that measure no time, in parallel"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help="maximum number of seconds for each piece (default: %(default)g)",
    )
    arguments = parser.parse_args(argv)
    if unknown := [piece for piece in arguments.pieces if piece not in PIECES]:
        parser.error(f"{unknown[0]} is not a piece; the pieces are {', '.join(PIECES)}")
    chosen = arguments.pieces or [*PIECES]
    if arguments.dry_run:
        show(chosen, Day(arguments.rehearse, RESULTS))
        return 0
    if arguments.rehearse:
        with tempfile.TemporaryDirectory() as folder:
            return run_all(chosen, Day(True, Path(folder), REHEARSAL_LIMIT), arguments.together)
    if reason := why_no_gpu():
        print(
            f"gpu: {reason}; this script requires a CUDA GPU and a torch built for it. "
            "--dry-run shows what would run.",
            file=sys.stderr,
        )
        return _NO_GPU
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = run_all(chosen, Day(False, RESULTS, arguments.limit), arguments.together)
    subprocess.run([PYTHON, str(ROOT / "scripts" / "gpu_page.py")], check=True)
    return failed


def why_no_gpu() -> str:
    """Return the reason why nothing can run here, or an empty string if everything can."""
    import torch

    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def show(chosen: Sequence[str], day: Day) -> None:
    """Print a description of each piece, and its commands."""
    for name in chosen:
        print(f"# {name}: {PIECES[name].__doc__}")
        for command in PIECES[name](day):
            print(shlex.join(command))


def run_all(chosen: Sequence[str], day: Day, together: bool = False) -> int:
    """Run pieces one by one, or first all those that measure no time at once; return 1 if one failed."""
    beside = [name for name in chosen if together and name in UNTIMED]
    with ThreadPoolExecutor(max(1, len(beside))) as pool:
        failed = sum(pool.map(lambda name: run_and_tell(name, day), beside))
    return int(failed + sum(run_and_tell(name, day) for name in chosen if name not in beside) > 0)


def run_and_tell(name: str, day: Day) -> bool:
    """Run a piece, write its result, and print a line; return True if one of its commands failed."""
    outcome = run(name, day)
    (day.results / f"{name}.piece.json").write_text(json.dumps(outcome, indent=1) + "\n")
    worst = next((row for row in outcome["commands"] if row["exit_code"]), None)
    print(f"gpu: {name}: {outcome['seconds']:.0f} s, {told(worst)}", flush=True)
    return worst is not None


def told(row: dict | None) -> str:
    """Return a description of the first command that failed, or None if no command failed."""
    if row is None:
        return "well"
    whys = {LATE: "no end in time", BEYOND: "operations beyond their limits"}
    why = whys.get(row["exit_code"], f"exit code {row['exit_code']}")
    return f"{why}: {row['command']}\n{row['end']}"


def run(name: str, day: Day) -> dict:
    """Run a piece until it ends or its time is up; return the results of its commands."""
    begin, rows = time.monotonic(), []
    environment = {**os.environ, "MEGATRON_NPU_DEVICE": day.device, "PYTHONPATH": python_path()}
    with open(day.results / f"{name}.log", "w") as log:
        for command in PIECES[name](day):
            left = day.limit - (time.monotonic() - begin)
            start = log.tell()
            code = exit_code(command, environment, log, left)
            log.seek(0, os.SEEK_END)
            if not code and WRONG.search(Path(log.name).read_bytes()[start:]):
                code = BEYOND
            rows.append(
                {"command": shlex.join(command), "exit_code": code, "end": tail(Path(log.name), start)}
            )
    return {"piece": name, "seconds": time.monotonic() - begin, "commands": rows}


def python_path() -> str:
    """Return the search path for programs: this project, and the machine's own path."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def exit_code(command: Command, environment: dict[str, str], log: IO[str], seconds: float) -> int:
    """Run a command until it ends or its time is up, and end all its processes; return how it ended.

    Ranks that outlive the process that started them would hold GPU memory that later pieces need.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return LATE
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path, start: int) -> str:
    """Return the last lines of a command's output."""
    text = log.read_bytes()[start:].decode(errors="replace")
    return "\n".join(text.splitlines()[-12:])


if __name__ == "__main__":
    sys.exit(main())
