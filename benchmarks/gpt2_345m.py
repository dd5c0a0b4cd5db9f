"""GPT-2 345M with Megatron-DeepSpeed: three iterations with the model of docs/tutorials/gpt2-345m.md.

    export MEGATRON_LM_PATH=TREE
    python benchmarks/gpt2_345m.py DATA cpu      # one process
    python benchmarks/gpt2_345m.py DATA npu      # eight simulated NPUs: tensor parallel, DeepSpeed

DATA is the folder from the guide's step 2: gpt2-vocab.json, gpt2-merges.txt, meg-gpt2_text_document.bin and
.idx. The script is the one on the guide's page, started with ``python -m torch.distributed.launch``: 24
layers of 1,024 and 1,024 tokens. Flags after the guide's change what this machine or a comparison requires:

    --bf16                      instead of --fp16, with which CPU matmuls are 150 times as slow
    micro batch 1, batch 2      instead of 4 and 8, because of memory and time
    --use-cpu-initialization    the same weights for any number of ranks
    no dropout, a vocabulary padded to 50,688: both runs do the same computation
    --lr-decay-iters 3          so that three iterations have a learning rate; no validation, no data-loading
                                processes, no checkpoint unless --save names a folder

Losses, seconds, and the host memory of the process that used most (for simulated NPUs, whose memory is host
memory, including devices) go to benchmarks/results/gpt2-345m-WHERE.json; for the NPUs also the bytes of each
device, which upstream's own report shows after the first iteration, beside the calculated ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import report

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorials" / "gpt2-345m.md"
LAYERS, HIDDEN, LENGTH, VOCABULARY = 24, 1024, 1024, 50688
BATCH = 2
DECAY = 3  # iterations: of this many, however few of them are run, the learning rate tells
LOSS = re.compile(r" iteration +(\d+)/.* lm loss: (\S+) ")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \| allocated: (\S+) \| max allocated: (\S+)"
)
BUCKET = 2**22  # elements of DeepSpeed's buckets, whose default of 5e8 is larger than the model


@dataclass(frozen=True)
class Place:
    """The place in which a run is executed.

    Attributes:
        before: the command that starts the script.
        ranks: number of processes.
        tensor: tensor-parallel size; the other ranks shard Adam's states with ZeRO 1.
    """

    before: tuple[str, ...]
    ranks: int
    tensor: int

    def weights(self) -> int:
        """Return the number of weights of a rank."""
        share = self.tensor
        layer = (12 * HIDDEN**2 + 7 * HIDDEN) // share + 6 * HIDDEN
        return LAYERS * layer + VOCABULARY // share * HIDDEN + LENGTH * HIDDEN + 2 * HIDDEN

    def engine(self) -> bool:
        """Return True if DeepSpeed's engine is used for training."""
        return self.ranks > 1


PLACES = {
    "cpu": Place((), 1, 1),
    "npu": Place((sys.executable, "-m", "megatron_npu", "sim", "--devices", "8", "--"), 8, 8),
}


def script() -> str:
    """Return the guide's script without its checkpoint folders, and with a free port."""
    text = PAGE.read_text(encoding="utf-8")
    (found,) = re.findall(
        r"cat > pretrain_gpt2\.sh <<'SCRIPT'\n(.*?)^SCRIPT$", text, re.MULTILINE | re.DOTALL
    )
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    changes = {"MASTER_PORT=6000": f"MASTER_PORT={port}", "--fp16 ": "--bf16 "}
    changes |= {f"    --{flag} $CHECKPOINT_PATH \\\n": "" for flag in ("save", "load")}
    for before, after in changes.items():
        assert found.count(before) == 1, before
        found = found.replace(before, after)
    return found


def flags(place: Place, folder: Path, iterations: int, save: Path | None) -> Iterator[str]:
    """Yield the flags after the guide's; DeepSpeed's configuration is written to ``folder``."""
    pad = VOCABULARY // 99 // place.tensor
    yield from f"--micro-batch-size 1 --global-batch-size {BATCH} --use-cpu-initialization".split()
    yield from f"--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by {pad}".split()
    yield from f"--train-iters {iterations} --lr-decay-iters {DECAY} --log-interval 1".split()
    yield from f"--tensor-model-parallel-size {place.tensor} --num-workers 0 --eval-iters 0".split()
    yield from ("--split", "100,0,0")
    if save:
        yield from ("--save", str(save))
    if place.engine():
        file = folder / "deepspeed.json"
        zero = {"stage": 1, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        sizes = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": BATCH, "gradient_clipping": 1.0}
        file.write_text(json.dumps({**sizes, "bf16": {"enabled": True}, "zero_optimization": zero}))
        yield from f"--deepspeed --deepspeed_config {file} --zero-stage 1".split()
        yield "--deepspeed-activation-checkpointing"


def measure(tree: Path, data: Path, where: str, iterations: int, save: Path | None) -> dict[str, Any]:
    """Train; return the measurements."""
    place = PLACES[where]
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        (folder / "data").symlink_to(data.resolve())
        (folder / "pretrain_gpt.py").symlink_to(tree / "pretrain_gpt.py")
        (folder / "pretrain_gpt2.sh").write_text(script())
        changed = list(flags(place, folder, iterations, save))
        # the script says `python`, and its model is imported from the tree
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # glibc otherwise keeps what eight ranks free after they have drawn their weights
        malloc = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}
        settings = malloc | {"GPUS_PER_NODE": str(place.ranks), "PYTHONPATH": str(tree), "PATH": path}
        command = [*place.before, "bash", "./pretrain_gpt2.sh", *changed]
        seen = follow(command, folder, {**os.environ, "OMP_NUM_THREADS": "1", **settings})
    if len(seen["losses"]) != iterations:
        raise SystemExit(f"{where}: {len(seen['losses'])} of {iterations} iterations were seen; see above")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "ranks": place.ranks,
        "tensor": place.tensor,
        "flags": [flag.removeprefix(f"{top}/") for flag in changed],
        "fullest_process": peak,
        **seen,
    }


def follow(command: list[str], folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """Run the command; return losses, the seconds of each iteration, and the memory of devices, by rank."""
    begin = last = time.monotonic()
    losses, seconds, held = [], [], {}
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        for line in running.stdout or ():
            now = time.monotonic()
            print(f"{now - begin:8.1f} s  {line}", end="", file=sys.stderr)
            if "training ..." in line or "before the start of training step" in line:
                last = now
            if found := LOSS.search(line):
                losses.append(float(found[2]))
                seconds.append(round(now - last, 1))
                last = now
            for found in MEMORY.finditer(line):  # of ranks that wrote at once, too
                held[found[1]] = {"between_steps": mib(found[2]), "peak": mib(found[3])}
    if running.returncode:
        raise SystemExit(f"exit code {running.returncode}; see above")
    return {"losses": losses, "seconds": seconds, "whole": round(time.monotonic() - begin), "held": held}


def mib(number: str) -> int:
    """Return a number of MiB in bytes."""
    return round(float(number) * 2**20)


def arithmetic(place: Place) -> int:
    """Return a rank's bytes between steps: bf16 weights, and its shard of fp32 weights and moments."""
    return place.weights() * 2 + place.weights() * 12 * place.tensor // place.ranks


def main() -> None:
    """Measure, compare with the calculated values, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("where", nargs="+", choices=PLACES)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--save", type=Path, help="folder in which to save the last checkpoint of the run")
    arguments = parser.parse_args()
    tree = Path(os.environ["MEGATRON_LM_PATH"]).resolve()
    for where in arguments.where:
        found = measure(tree, arguments.data, where, arguments.iterations, arguments.save)
        if where == "npu":
            expected = arithmetic(PLACES[where])
            found |= {"weights": PLACES[where].weights(), "arithmetic": expected}
        print(json.dumps(found, indent=1))
        versions = {"deepspeed": version("deepspeed")}
        report.write(report.RESULTS / f"gpt2-345m-{where}.json", {**found, "threads": 1}, **versions)


if __name__ == "__main__":
    main()
