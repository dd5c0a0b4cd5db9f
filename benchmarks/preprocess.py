r"""Compare `megatron-npu preprocess` with Megatron-LM's own tool on the same file, alternating.

    python benchmarks/preprocess.py --megatron CHECKOUT --corpus FILE.jsonl \
        --vocab-file vocab.json --merge-file merges.txt
    python benchmarks/preprocess.py --gigatoken ...        (also compare with that package, if installed)

All run as a user would run them, as separate processes with the same number of workers. Startup (imports,
tokenizer) is measured with only the first line of the file and reported separately, because for a large
corpus only the rest matters. CPU time, which other programs on the machine affect less, is reported too. The
outputs must be equal byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent
Samples = dict[str, list[float]]  # of each tool whole runs, and starts


def main() -> None:
    """Measure, print and write the result."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        runs = [_measure(arguments, workers, Path(name)) for workers in arguments.workers]
    results = {
        **({"stock": "tools/preprocess_data.py --legacy-tokenizer"} if arguments.megatron else {}),
        "corpus_bytes": arguments.corpus.stat().st_size,
        "rounds": arguments.rounds,
        "runs": runs,
    }
    packages = ("numpy", "regex", "tokenizers", *(["gigatoken"] if arguments.gigatoken else []))
    versions = {name: importlib.metadata.version(name) for name in packages}
    report.write(arguments.output, results, **versions)
    print(json.dumps(runs, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--megatron", type=Path, help="Megatron-LM checkout whose preprocessing tool is also measured"
    )
    parser.add_argument("--gigatoken", action="store_true", help="also measure the package gigatoken")
    parser.add_argument(
        "--corpus", type=Path, required=True, help="corpus file: JSON lines with the key text"
    )
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
    tools = {"ours": [sys.executable, "-m", "megatron_npu", "preprocess"]}
    if arguments.megatron:
        stock = str(HERE / "stock_preprocess.py")
        tools["stock"] = [sys.executable, stock, str(arguments.megatron), "--legacy-tokenizer"]
    if arguments.gigatoken:
        tools["gigatoken"] = [sys.executable, str(HERE / "gigatoken_preprocess.py")]
    names = [f"{tool}_{part}" for tool in tools for part in ("whole", "start")]
    samples: tuple[Samples, Samples] = ({name: [] for name in names}, {name: [] for name in names})
    for _ in range(arguments.rounds):
        for tool, command in tools.items():
            for part, corpus in (("whole", arguments.corpus), ("start", one_line)):
                found = _run(command, arguments, corpus, directory / f"{tool}_{part}", workers)
                for kind, seconds in zip(samples, found, strict=True):
                    kind[f"{tool}_{part}"].append(seconds)
        _require_equal(directory, list(tools))
    return _summary(*samples, list(tools), workers, arguments.corpus.stat().st_size / 1e6)


def _run(
    command: list[str], arguments: argparse.Namespace, corpus: Path, prefix: Path, workers: int
) -> tuple[float, float]:
    """Return the wall time and the CPU time of one process in seconds."""
    flags = ["--input", corpus, "--output-prefix", prefix, "--tokenizer-type", "GPT2BPETokenizer"]
    flags += ["--vocab-file", arguments.vocab_file, "--merge-file", arguments.merge_file, "--append-eod"]
    flags += ["--workers", workers]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = dict(os.environ, PYTHONPATH=path, MEGATRON_NPU_AUTOLOAD="0")
    begin, used = time.perf_counter(), _processor_seconds()
    subprocess.run([*command, *map(str, flags)], check=True, env=environment, capture_output=True)
    return time.perf_counter() - begin, _processor_seconds() - used


def _processor_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _require_equal(directory: Path, tools: list[str]) -> None:
    for end in ("bin", "idx"):
        digests = {
            hashlib.sha256((directory / f"{tool}_whole_text_document.{end}").read_bytes()).hexdigest()
            for tool in tools
        }
        if len(digests) != 1:
            raise SystemExit(f"the .{end} files differ, so that their times cannot be compared")


def _summary(
    seconds: Samples, processor: Samples, tools: list[str], workers: int, megabytes: float
) -> dict[str, object]:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    net, net_processor = _without_start(seconds, tools), _without_start(processor, tools)
    return {
        "workers": workers,
        "seconds": _rounded(seconds),
        "processor_seconds": _rounded(processor),
        "megabytes_per_second_without_start": {tool: round(megabytes / net[tool], 2) for tool in net},
        "megabytes_per_processor_second_without_start": {
            tool: round(megabytes / net_processor[tool], 2) for tool in tools
        },
        **(
            {
                "times_faster_whole": round(median["stock_whole"] / median["ours_whole"], 2),
                "times_faster_without_start": round(net["stock"] / net["ours"], 2),
            }
            if "stock" in tools
            else {}
        ),
        "outputs_equal": True,
    }


def _without_start(samples: Samples, tools: list[str]) -> dict[str, float]:
    """Return the medians of whole runs, minus those of startup."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {tool: median[f"{tool}_whole"] - median[f"{tool}_start"] for tool in tools}


def _rounded(samples: Samples) -> Samples:
    return {name: [round(value, 3) for value in values] for name, values in samples.items()}


if __name__ == "__main__":
    main()
