"""Start programs with Megatron-LM's main or 0.19.2, on the CPU or a simulated NPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "benchmarks")) if path not in sys.path]

import equal_numbers as equal  # noqa: E402

from tests.support import tiny  # noqa: E402

MAIN, BEFORE = "0.20.0", "0.19.2"
TREE = ROOT / "checkouts" / equal.TREES[MAIN]
OPTIMIZERS = ROOT / "checkouts" / "emerging_optimizers-0.3.0"  # Muon's
Row = dict[str, Any]


def run(version: str, device: str, words: list[str], processes: int = 1, **variables: str) -> str:
    """Run ``python WORDS`` with a version of Megatron; return its output.

    Raises:
        RuntimeError: the program's exit code is not 0.
    """
    tree = ROOT / "checkouts" / equal.TREES.get(version, f"megatron_core-{version}")
    path = os.pathsep.join(filter(None, [str(tree), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "MEGATRON_LM_PATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(tiny.torchrun(processes) if processes > 1 else []), *words]
    if device == "npu":
        command = [sys.executable, "-m", "megatron_npu", "sim", "--", *command]
    else:
        environment["MEGATRON_NPU_DEVICE"] = "cpu"
    done = subprocess.run(
        command,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=equal.LIMIT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{done.stdout[-3000:]}")
    return done.stdout


def deviation(values: list[float], expected: list[float]) -> float | str:
    """Return the largest relative difference of two curves, or the reason why there is none."""
    if not values or len(values) != len(expected):
        return f"failed: {len(values)} iterations instead of {len(expected)}"
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def differing(one: Path, other: Path, folder: Path) -> tuple[int, int]:
    """Return how many entries a checkpoint of main has, and how many tensors differ in the other one.

    Args:
        folder: where the worker's instructions are written.
    """
    job = folder / "differ.json"
    job.write_text(json.dumps({"folders": [str(one), str(other)]}))
    said = run(MAIN, "cpu", [str(ROOT / "benchmarks" / "main_numbers.py"), "--worker", "differ", str(job)])
    total, differ = json.loads(said.splitlines()[-1])
    return total, differ
