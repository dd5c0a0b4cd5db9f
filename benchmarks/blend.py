"""Measure the time to build the indices of a blend, with this project and upstream's C++, alternating.

    python benchmarks/blend.py --megatron CHECKOUT      (a Megatron-LM checkout, or an unpacked megatron-core)

Upstream's helpers.cpp is compiled here with the flags of its own Makefile and torch's pybind11; for a wheel,
its own compiled extension is used. Our side is what a checkout without compiled helpers gets: our C++ and,
for machines without a compiler, Python with numpy. All build the same blends, and the indices must be equal.
Times are minima over the rounds; those for 146 million samples, as in GPT-3's blend, are extrapolated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import report
import torch
from numpy.typing import NDArray

from megatron_npu.standins.datasets import compiled_dataset_indices, core_dataset_helpers

SAMPLES = 146_000_000  # what is told of
_MAKEFILE = ("-O3", "-Wall", "-shared", "-std=c++17", "-fPIC")  # of upstream
_PYTHONS_SHARE = 20  # of the samples: it takes so many times as long

Way = Callable[[NDArray[np.int16], NDArray[np.int64], NDArray[np.float64]], None]
Ways = dict[str, tuple[Way, int]]  # each with the number of samples that it is asked for


def main() -> None:
    """Measure, print and write the result."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        upstream = _extension(arguments.megatron, Path(folder))
        rows = [_measure(upstream, count, arguments) for count in arguments.datasets]
    results = {"samples": arguments.samples, "rounds": arguments.rounds, "blends": rows}
    report.write(arguments.output, results, numpy=np.__version__)
    print(json.dumps(rows, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, help="folder that contains megatron/")
    parser.add_argument("--datasets", type=int, nargs="+", default=[10, 100, 300])
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "blend.json")
    return parser.parse_args()


def _extension(megatron: Path, folder: Path) -> ModuleType:
    """Return upstream's ``helpers_cpp``, compiling it if it is not compiled."""
    datasets = megatron / "megatron" / "core" / "datasets"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = datasets / f"helpers_cpp{suffix}"
    if not target.is_file():
        target = folder / target.name
        includes = [Path(torch.__file__).parent / "include", sysconfig.get_path("include")]
        command = ["g++", *_MAKEFILE, *(f"-I{path}" for path in includes)]
        subprocess.run([*command, str(datasets / "helpers.cpp"), "-o", str(target)], check=True)
    spec = importlib.util.spec_from_file_location("helpers_cpp", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _measure(upstream: ModuleType, count: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the microseconds per sample for each way to build the indices."""
    weights = np.random.default_rng(count).uniform(0.1, 1.0, count)
    weights /= weights.sum()
    ways = _ways(upstream, arguments.samples)
    best: dict[str, float] = {}
    found: dict[str, list[NDArray[np.generic]]] = {}
    for _ in range(arguments.rounds):
        for name, (way, samples) in ways.items():
            index, sample = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
            begun = time.perf_counter()
            way(index, sample, weights)
            best[name] = min(best.get(name, np.inf), (time.perf_counter() - begun) / samples)
            found[name] = [index, sample]
    for name, ours in found.items():
        for left, right in zip(ours, found["upstream"], strict=True):
            if not np.array_equal(left, right[: len(left)]):
                sys.exit(f"{name} returns indices that differ from those of upstream's extension")
    return _row(count, best)


def _ways(upstream: ModuleType, samples: int) -> Ways:
    def call(module: ModuleType) -> Way:
        def way(index: NDArray[np.int16], sample: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
            module.build_blending_indices(index, sample, weights, len(weights), len(index), False)

        return way

    def in_python(index: NDArray[np.int16], sample: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        with _without_a_compiler():
            call(core_dataset_helpers)(index, sample, weights)

    if compiled_dataset_indices.library() is None:
        sys.exit("there is no g++ on this machine, so there is nothing to compare")
    few = max(1, samples // _PYTHONS_SHARE)
    return {
        "upstream": (call(upstream), samples),
        "ours": (call(core_dataset_helpers), samples),
        "python": (in_python, few),
    }


@contextlib.contextmanager
def _without_a_compiler() -> Iterator[None]:
    with mock.patch.object(compiled_dataset_indices, "library", return_value=None):
        yield


def _row(count: int, best: dict[str, float]) -> dict[str, object]:
    return {
        "datasets": count,
        **{f"{name}_us_a_sample": round(1e6 * seconds, 4) for name, seconds in best.items()},
        **{f"{name}_minutes_for_146M": round(seconds * SAMPLES / 60, 2) for name, seconds in best.items()},
        "ours_over_upstream": round(best["ours"] / best["upstream"], 2),
    }


if __name__ == "__main__":
    main()
