"""Measures `megatron-npu preprocess` against Megatron-LM's own tool on the same file, alternating.

    python benchmarks/preprocess.py --megatron CHECKOUT --corpus FILE.jsonl \
        --vocab-file vocab.json --merge-file merges.txt

Both run as a user runs them, as a process of their own, with the same number of workers. Start-up (imports,
tokenizer) is measured with the first line of the file alone and reported apart: on a corpus of any size only
the rest counts. The outputs must be equal byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure, print and write the result."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        runs = [_measure(arguments, workers, Path(name)) for workers in arguments.workers]
    results = {
        "stock": "tools/preprocess_data.py --legacy-tokenizer",
        "corpus_bytes": arguments.corpus.stat().st_size,
        "rounds": arguments.rounds,
        "runs": runs,
    }
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "regex", "tokenizers")}
    report.write(arguments.output, results, **versions)
    print(json.dumps(runs, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, help="a Megatron-LM checkout")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, key text")
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "preprocess.json")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace, workers: int, directory: Path) -> dict[str, object]:
    """Return medians over the rounds; in each round the four runs follow one another."""
    one_line = directory / "one_line.jsonl"
    with open(arguments.corpus, "rb") as stream:
        one_line.write_bytes(stream.readline())
    tools = {
        "ours": [sys.executable, "-m", "megatron_npu", "preprocess"],
        "stock": [
            sys.executable, str(HERE / "stock_preprocess.py"), str(arguments.megatron), "--legacy-tokenizer",
        ],
    }  # fmt: skip
    samples: dict[str, list[float]] = {f"{tool}_{part}": [] for tool in tools for part in ("whole", "start")}
    for _ in range(arguments.rounds):
        for tool, command in tools.items():
            for part, corpus in (("whole", arguments.corpus), ("start", one_line)):
                seconds = _run(command, arguments, corpus, directory / f"{tool}_{part}", workers)
                samples[f"{tool}_{part}"].append(seconds)
        _require_equal(directory)
    return _summary(samples, workers, arguments.corpus.stat().st_size / 1e6)


def _run(
    command: list[str], arguments: argparse.Namespace, corpus: Path, prefix: Path, workers: int
) -> float:
    """Return the seconds of one process."""
    flags = ["--input", corpus, "--output-prefix", prefix, "--tokenizer-type", "GPT2BPETokenizer"]
    flags += ["--vocab-file", arguments.vocab_file, "--merge-file", arguments.merge_file, "--append-eod"]
    flags += ["--workers", workers]
    environment = dict(os.environ, PYTHONPATH=str(HERE.parent), MEGATRON_NPU_AUTOLOAD="0")
    begin = time.perf_counter()
    subprocess.run([*command, *map(str, flags)], check=True, env=environment, capture_output=True)
    return time.perf_counter() - begin


def _require_equal(directory: Path) -> None:
    for end in ("bin", "idx"):
        digests = {
            hashlib.sha256((directory / f"{tool}_whole_text_document.{end}").read_bytes()).hexdigest()
            for tool in ("ours", "stock")
        }
        if len(digests) != 1:
            raise SystemExit(f"the .{end} files differ: nothing to compare")


def _summary(samples: dict[str, list[float]], workers: int, megabytes: float) -> dict[str, object]:
    median = {name: statistics.median(values) for name, values in samples.items()}
    net = {tool: median[f"{tool}_whole"] - median[f"{tool}_start"] for tool in ("ours", "stock")}
    return {
        "workers": workers,
        "seconds": {name: [round(value, 3) for value in values] for name, values in samples.items()},
        "megabytes_per_second_without_start": {tool: round(megabytes / net[tool], 2) for tool in net},
        "times_faster_whole": round(median["stock_whole"] / median["ours_whole"], 2),
        "times_faster_without_start": round(net["stock"] / net["ours"], 2),
        "outputs_equal": True,
    }


if __name__ == "__main__":
    main()
