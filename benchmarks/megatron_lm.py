"""Tokens per second of Megatron-LM 285068c8's stock pretrain_gpt.py: all patches, or the redirection alone.

    python benchmarks/megatron_lm.py --megatron PATH --dtype bf16 --rounds 3

A GPT with 30.4 million parameters (19.3 of them in the embedding) at 1,024 tokens, on a CPU. "redirection" is
the smallest set of patches with which the script runs: stubs, the redirection of torch.cuda, and the fixes of
startup, random states and layer norm (a CUDA extension upstream); attention, softmax, GELU, dropout,
embedding and loss are upstream's. Both variants run the same command line, each in a separate process, in
turn.

Step times are those in Megatron's log. CPU time, which other load on the machine affects less, is recorded
too (only with OMP_NUM_THREADS=1, because threads that wait for each other count too). Results go to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import report

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"layers": 6, "hidden": 384, "heads": 6, "seq": 1024, "batch": 2}
VOCABULARY = 50257  # GPT-2's; padded to 50,304 by Megatron
VARIANTS = ("project", "redirection")
WARM_UP = 2  # steps that are not counted
# What "redirection" leaves out (targets that begin so): what makes the script faster and not just run.
OPERATIONS = (
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.tensor_parallel.layers",
    "megatron.model.distributed",
    "megatron.model.fused_bias_gelu",
    "megatron.model.fused_softmax",
    "megatron.model.gpt_model",
    "megatron.model.transformer",
    "megatron.optimizer.optimizer:_multi_tensor_copy_this_to_that",
)


def main() -> None:
    """Measure both variants in turn, or run the script as one of them (in a child)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, default=os.environ.get("MEGATRON_LM_PATH"), metavar="PATH")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.1,
        help="value of both of Megatron's dropout flags (Megatron's default: 0.1)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="number of counted steps in each round")
    parser.add_argument(
        "--script", nargs=argparse.REMAINDER, help="run a script in a variant: VARIANT SCRIPT ARGUMENTS"
    )
    arguments = parser.parse_args()
    if arguments.script:
        run_script(*arguments.script)
        return
    if arguments.megatron is None:
        parser.error(
            "a checkout of Megatron-LM 285068c8 is required: pass --megatron PATH, or set MEGATRON_LM_PATH"
        )
    rounds: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for _ in range(arguments.rounds):
            for variant in VARIANTS:
                rounds[variant].append(measure(variant, Path(folder), arguments))
    write(arguments, rounds)


def run_script(variant: str, *command: str) -> None:
    """Run a stock script like ``megatron-npu run``; for "redirection", without the operations."""
    from megatron_npu import adaptors
    from megatron_npu.base import settings
    from megatron_npu.commands import run
    from megatron_npu.patching.registry import registry

    if variant == "redirection":
        os.environ[settings.KEEP_MEMORY.name] = "0"
        adaptors.register("megatron_lm")
        registry.keep(lambda patch: not patch.target.startswith(OPERATIONS))
    sys.exit(run.main(list(command)))


def measure(variant: str, folder: Path, arguments: argparse.Namespace) -> dict:
    """Run the stock script once; return the times of its measured steps, its last loss and the load."""
    load = os.getloadavg()[0]
    script = arguments.megatron / "pretrain_gpt.py"
    command = [sys.executable, __file__, "--script", variant, str(script), *flags(folder, arguments)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Bytecode would be written into the checkout.
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "MEGATRON_NPU_DEVICE": "cpu",
    }
    errors = folder / "errors.log"
    with (
        errors.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True) as child,
    ):
        steps = list(steps_of(child.stdout, psutil.Process(child.pid)))[-arguments.steps :]
    if child.returncode or len(steps) < arguments.steps:
        sys.exit(
            f"{variant} ended with {child.returncode} after {len(steps)} steps: {errors.read_text()[-4000:]}"
        )
    row = {
        "seconds": [seconds for seconds, _, _ in steps],
        "cpu_seconds": [cpu for _, cpu, _ in steps],
        "last_loss": steps[-1][2],
        "load": [load, os.getloadavg()[0]],
    }
    wall, cpu = (statistics.median(row[key]) for key in ("seconds", "cpu_seconds"))
    print(
        f"{variant:<12} {tokens_per_second(wall):8.1f} tokens/s, {cpu:6.2f} processor seconds a step, ",
        end="",
    )
    print(f"loss {row['last_loss']:.4f}, load {load:.1f}", flush=True)
    return row


def steps_of(log: Iterable[str], process: psutil.Process) -> Iterator[tuple[float, float, float]]:
    """Yield the seconds, the CPU seconds and the loss of each step in Megatron's log."""
    before = 0.0
    for line in log:
        found = re.search(r"elapsed time per iteration \(ms\): ([0-9.]+).*?lm loss: ([0-9.E+-]+)", line)
        if found:
            times = process.cpu_times()
            total = times.user + times.system
            yield float(found[1]) / 1000, total - before, float(found[2])
            before = total


def flags(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the flags of the run; all others have Megatron's defaults."""
    steps = arguments.steps + WARM_UP
    return [
        *f"--num-layers {MODEL['layers']} --hidden-size {MODEL['hidden']}".split(),
        *f"--num-attention-heads {MODEL['heads']} --seq-length {MODEL['seq']}".split(),
        *f"--max-position-embeddings {MODEL['seq']} --micro-batch-size {MODEL['batch']}".split(),
        *f"--global-batch-size {MODEL['batch']} --train-iters {steps} --lr-decay-iters {steps}".split(),
        *"--lr 1.5e-4 --min-lr 1e-5 --clip-grad 1.0 --weight-decay 0.01 --log-interval 1".split(),
        *"--eval-iters 0 --eval-interval 1000 --split 100,0,0 --num-workers 0".split(),
        *f"--attention-dropout {arguments.dropout} --hidden-dropout {arguments.dropout}".split(),
        *f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt".split(),
        *f"--data-path {folder}/text".split(),
        # Upstream's kernels for it are CUDA extensions: in 16 bits the script does not run without this.
        "--no-masked-softmax-fusion",
        *(["--bf16"] if arguments.dtype == "bf16" else []),
    ]


def write_data(folder: Path) -> None:
    """Write a vocabulary of GPT-2's size, and documents with word frequencies like those of a language."""
    import numpy as np

    from megatron_npu.data.preprocessing import indexed_dataset

    write_vocabulary(folder, VOCABULARY)
    generator = np.random.default_rng(1)
    with indexed_dataset.Writer(str(folder / "text"), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            tokens = np.minimum(generator.zipf(1.2, 1000), VOCABULARY - 1).astype(np.uint16)
            tokens[-1] = VOCABULARY - 1  # end of text
            writer.add(tokens.tobytes(), np.array([tokens.size], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])


def write_vocabulary(folder: Path, words: int) -> None:
    """Write the files of a byte-pair vocabulary of a given size; no text is ever tokenized with it."""
    names = [f"word{number}" for number in range(words - 1)] + ["<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def tokens_per_second(seconds: float) -> float:
    """Return the tokens per second of a step that takes ``seconds``."""
    return MODEL["batch"] * MODEL["seq"] / seconds


def write(arguments: argparse.Namespace, rounds: dict[str, list[dict]]) -> None:
    """Print the ratio, and write everything as JSON with a description of the machine."""
    seconds = collect(rounds, "seconds")
    speeds = {name: tokens_per_second(statistics.median(times)) for name, times in seconds.items()}
    ratios = {
        "median": ratio(seconds, statistics.median),
        "fastest": ratio(seconds, min),
        "median_processor_time": ratio(collect(rounds, "cpu_seconds"), statistics.median),
    }
    results = {
        "script": "pretrain_gpt.py of Megatron-LM 285068c8",
        "model": MODEL,
        "dtype": arguments.dtype,
        "dropout": arguments.dropout,
        "rounds": rounds,
        "tokens_per_second": speeds,
        "project_over_redirection": ratios,
    }
    name = f"megatron-lm-30m-{arguments.dtype}-dropout-{arguments.dropout:g}-cpu.json"
    report.write(report.RESULTS / name, results)
    for name, value in ratios.items():
        print(f"project / redirection {name:<22} {value:.2f}")


def collect(rounds: dict[str, list[dict]], key: str) -> dict[str, list[float]]:
    """Return the times of all rounds of each variant."""
    return {name: [time for row in rows for time in row[key]] for name, rows in rounds.items()}


def ratio(times: dict[str, list[float]], of: Callable[[list[float]], float]) -> float:
    """Return the speed-up of the project over the redirection."""
    return of(times["redirection"]) / of(times["project"])


if __name__ == "__main__":
    main()
