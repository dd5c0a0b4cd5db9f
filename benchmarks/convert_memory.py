"""Measure the memory of `megatron-npu convert`, verification included, as multiples of the weights' size.

    python benchmarks/convert_memory.py

Random Hugging Face models of about 500 MB are converted to Megatron and back, each in a separate process. The
result is the peak of its resident set (getrusage, including pages of mapped files) minus that of the same
command with a model of a few kilobytes, which stands for the imports. `tree` adds the processes that it forks
for writing, sampled from /proc with each shared page counted once. Needs the extras core and hf. Results:
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent
PERIOD = 0.05  # seconds between two samples of the tree
# Embeddings weigh what they weigh in the small models of each family.
MODELS = {
    "llama": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 16000,
        "max_position_embeddings": 2048,
    },
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
}
TINY = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 64},
}


def main() -> None:
    """Measure all models, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--output", type=Path, default=report.RESULTS / "convert-memory.json")
    parser.add_argument(
        "--before",
        type=Path,
        help="results of an earlier version, which are stored together with the new ones",
    )
    arguments = parser.parse_args()
    runs = [run for model in arguments.models for dtype in arguments.dtypes for run in measured(model, dtype)]
    versions = {name: importlib.metadata.version(name) for name in ("megatron-core", "transformers")}
    results: dict[str, object] = {"runs": runs}
    if arguments.before:
        results["before"] = json.loads(arguments.before.read_text(encoding="utf-8"))["runs"]
    report.write(arguments.output, results, **versions)


def measured(model: str, dtype: str) -> list[dict[str, object]]:
    """Return the results for both directions of one model."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for kind, sizes in (("tiny", TINY[model]), ("whole", MODELS[model])):
            in_child(make, place / kind, model, dtype, json.dumps(sizes))
        size = sum(file.stat().st_size for file in (place / "whole").glob("*.safetensors"))
        rows = []
        for source, target, end in (("hf", "megatron", "-m"), ("megatron", "hf", "-h")):
            begin = "" if source == "hf" else "-m"
            peaks = {}
            for kind in ("tiny", "whole"):
                folders = f"{place / kind}{begin}", f"{place / kind}{end}"
                peaks[kind] = converted("--from", source, "--to", target, *folders)
            row = {"model": model, "dtype": dtype, "to": target, "bytes": size, "seconds": peaks["whole"][2]}
            for number, name in enumerate(("process", "tree")):
                row[f"{name}_bytes"] = peaks["whole"][number] - peaks["tiny"][number]
                row[f"{name}_over_file"] = round(row[f"{name}_bytes"] / size, 3)
            print(json.dumps(row), flush=True)
            rows.append(row)
        return rows


def in_child(function, *words: object) -> None:
    """Call a function of this file in a separate process, which releases its memory when it ends."""
    code = f"import convert_memory as here; here.{function.__name__}(*{[str(word) for word in words]!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE, env=environment())


def make(folder: str, model: str, dtype: str, sizes: str) -> None:
    """Write a random Transformers model."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(model, **json.loads(sizes))
    transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def environment() -> dict[str, str]:
    """Return the environment for a measured process."""
    return dict(os.environ, PYTHONPATH=str(HERE.parent), OMP_NUM_THREADS="2", MEGATRON_NPU_DEVICE="cpu")


def converted(*words: str) -> tuple[int, int, float]:
    """Run the command; return the peaks of its process and of the tree in bytes, and its time in seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "megatron_npu", "convert", *words]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    tree = [0]
    stop = threading.Event()
    sampler = threading.Thread(target=sample, args=(process.pid, tree, stop))
    sampler.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    stop.set()
    sampler.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return usage.ru_maxrss * 1024, tree[0], round(time.perf_counter() - began, 1)


def sample(pid: int, largest: list[int], stop: threading.Event) -> None:
    """Record the peak total memory of a process and its descendants until stopped."""
    while not stop.wait(PERIOD):
        largest[0] = max(largest[0], sum(map(share, descendants(pid))))


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        except OSError:
            continue  # it has ended
    return found


def share(pid: int) -> int:
    """Return the bytes of a process; a page shared by several processes is divided among them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
