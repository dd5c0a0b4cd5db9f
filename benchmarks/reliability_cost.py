"""The cost of the protections for long runs: time of a step, a save and a load, without and with them.

    git worktree add /tmp/before 83b9baa
    python benchmarks/reliability_cost.py --before /tmp/before --rounds 5 --gigabytes 1 [--json FILE]

83b9baa has no watchdog, lock or checksums. Three variants of the built-in trainer take turns, each in a
separate process: that tree, this one, and this one with ``MEGATRON_NPU_WATCHDOG=0`` and
``--no-verify-checkpoint`` (its saves still write checksums). The trees differ in more than the protections;
the protections' cost in steps and loads is the ratio of the last two. Step times come from a small model,
saves and loads from one whose checkpoint has the given number of GB. Quote the ratios: they are computed for
pairs in one round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import page_cache
import report

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "--no-plot --eval-iters 0 --split 100,0,0 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 255"
SMALL = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 8"
LARGE = "--hidden-size 1024 --num-attention-heads 16 --seq-length 16 --micro-batch-size 1"
BYTES_OF_A_LAYER = 12 * 1024**2 * 12  # of LARGE: weights and Adam's two moments in fp32
WARM_UP = 10  # steps
SAVES, LOADS = 3, 3  # in each process; the first save, and the first load of each kind, warm up
PROTECTIONS_OFF = {"MEGATRON_NPU_WATCHDOG": "0"}
METRICS = ("step", "save", "cold", "warm")  # ms, and s for each GB: a load from the disk, and from memory


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Wrap ``function`` to record the time of each call while the disk has nothing else to write."""

    def call(*given: Any, **more: Any) -> Any:
        os.sync()
        start = time.perf_counter()
        result = function(*given, **more)
        seconds.append(time.perf_counter() - start)
        return result

    return call


def _positions(length: str) -> list[str]:
    return ["--max-position-embeddings", length]


def measure(data: str, folder: Path, gigabytes: float, steps: int, more: list[str]) -> dict[str, float]:
    """Return the metrics for the tree that this process has imported."""
    from megatron_npu.pretrain.checkpoint import checkpoints
    from megatron_npu.pretrain.flags import arguments
    from megatron_npu.pretrain.run import pretrain

    def train(*flags: str, stamps: list[float] | None = None) -> None:
        def note(*_: object) -> None:
            if stamps is not None:
                stamps.append(time.perf_counter())

        with contextlib.redirect_stdout(sys.stderr):
            pretrain.train(arguments.parse([*flags, *FLAGS.split(), "--data-path", data]), note)

    stamps: list[float] = []
    size = ["--global-batch-size", "8", "--train-iters", str(WARM_UP + steps)]
    train(*SMALL.split(), *_positions("128"), *size, stamps=stamps)
    steps_taken = [
        after - before for before, after in zip(stamps[WARM_UP:], stamps[WARM_UP + 1 :], strict=False)
    ]
    saves: list[float] = []
    loads: list[float] = []
    checkpoints.save = _timed(checkpoints.save, saves)
    checkpoints.load = _timed(checkpoints.load, loads)
    layers = str(max(1, round(gigabytes * 1e9 / BYTES_OF_A_LAYER)))
    large = [*LARGE.split(), *_positions("16"), "--num-layers", layers, "--global-batch-size", "1"]
    large += ["--train-iters", str(SAVES)]
    train(*large, "--save", str(folder), "--save-interval", "1")
    saved = folder / f"iter_{SAVES:07d}"
    written = sum(path.stat().st_size for path in saved.iterdir()) / 1e9
    for cold in (True, False):
        for _ in range(LOADS):
            if cold:
                page_cache.forget(saved)
            train(*large, "--load", str(folder), *more)
    found = {"save": saves[1:], "cold": loads[1:LOADS], "warm": loads[LOADS + 1 :]}
    return {
        "step": 1e3 * statistics.median(steps_taken),
        **{name: statistics.median(seconds) / written for name, seconds in found.items()},
        "gigabytes": written,
    }


def _dataset(folder: Path) -> str:
    """Write consecutive numbers as tokens; return the prefix of the files."""
    import numpy as np

    from megatron_npu.data.preprocessing import indexed_dataset

    with indexed_dataset.Writer(str(folder / "numbers"), np.dtype(np.uint16)) as writer:
        for _ in range(400):
            tokens = (np.arange(1000) % 255).astype(np.uint16)
            writer.add(tokens.tobytes(), np.array([1000], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    return str(folder / "numbers")


def _variants(before: Path) -> Iterator[tuple[str, Path, dict[str, str], list[str]]]:
    """Yield name, tree, environment and load flags of each variant."""
    yield "before", before, {}, []
    yield "now", ROOT, {}, []
    yield "off", ROOT, PROTECTIONS_OFF, ["--no-verify-checkpoint"]


def run(
    tree: Path, env: dict[str, str], given: argparse.Namespace, data: str, more: list[str]
) -> dict[str, float]:
    """Return the measurements of a process that imports ``tree``."""
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = ["--child", folder, "--data", data, "--gigabytes", str(given.gigabytes)]
        options += ["--steps", str(given.steps), "--", *more]
        done = subprocess.run(
            [sys.executable, __file__, *options],
            env={**os.environ, "MEGATRON_NPU_DEVICE": "cpu", "PYTHONPATH": str(tree), **env},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(given: argparse.Namespace) -> None:
    import megatron_npu

    tree = Path(megatron_npu.__file__).resolve().parents[1]
    if tree != Path(os.environ["PYTHONPATH"]).resolve():
        raise SystemExit(f"expected the package from {os.environ['PYTHONPATH']}, but {tree} was imported")
    print(json.dumps(measure(given.data, given.child, given.gigabytes, given.steps, given.more)))


def main() -> None:
    """Measure, print and write the result; or measure one tree (in a child)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="Git work tree of the commit to compare with")
    parser.add_argument("--gigabytes", type=float, default=1, help="size of the checkpoint in gigabytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=100, help="number of steps of the small model in each process"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure (default: the disk of /tmp)"
    )
    parser.add_argument("--json", type=Path, default=report.RESULTS / "reliability-cost-cpu.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _child(given)
    if given.before is None or not (given.before / "megatron_npu").is_dir():
        parser.error("--before requires a work tree: git worktree add /tmp/before 83b9baa")
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = _dataset(Path(folder))
        for number in range(given.rounds):
            for name, tree, env, more in _variants(given.before.resolve()):
                for metric, value in run(tree, env, given, data, more).items():
                    found.setdefault(name, {}).setdefault(metric, []).append(value)
                told = ", ".join(f"{metric} {found[name][metric][-1]:.4g}" for metric in METRICS)
                print(f"round {number + 1}, {name}: {told}", flush=True)
    commit = ["git", "-C", str(given.before), "rev-parse", "--short", "HEAD"]
    results: dict[str, Any] = {
        "before": subprocess.run(commit, stdout=subprocess.PIPE, text=True, check=True).stdout.strip(),
        "gigabytes": statistics.median(found["now"].pop("gigabytes")),
        "measured": {name: {metric: values[metric] for metric in METRICS} for name, values in found.items()},
        "ratios": {
            f"now of {other}": {
                metric: _ratio(found["now"][metric], found[other][metric]) for metric in METRICS
            }
            for other in ("before", "off")
        },
    }
    print(json.dumps(results["ratios"], indent=1))
    report.write(given.json, results)
    return None


def _ratio(own: list[float], others: list[float]) -> float:
    """Return the median of the ratios of the pairs in each round."""
    return statistics.median(one / other for one, other in zip(own, others, strict=True))


if __name__ == "__main__":
    main()
