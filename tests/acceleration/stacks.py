"""The stacks of switches that are tried, each for a model; as a program, one rank that tries them in turn.

``stacks.py FOLDER DEVICE`` writes ``FOLDER/RANK.json``: the name of a run -> its losses, or what went wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

STEPS, FEW = 20, 3  # of a run; of each stack of all that go together
SHARDINGS = ("none", "zero-1", "zero-2", "zero-3", "fsdp")
RESUMED = (("zero-1", "fsdp"), ("fsdp", "none"), ("none", "zero-2"), ("zero-2", "zero-1"))

# the name of a model and of the switches: each 20 steps long, on several ranks
LONG = [
    ("bert", {}),
    ("bert", {"sharding": "zero-1"}),
    ("bert", {"sharding": "zero-2"}),
    ("bert", {"sharding": "fsdp"}),
    ("bert", {"sharding": "zero-3", "mixed_precision": "bf16", "checkpoint_activations": True}),
    ("bert", {"sharding": "zero-1", "mixed_precision": "fp16"}),
    ("bert", {"sharding": "fsdp", "lora_rank": 4}),
    ("bert tokens", {"sharding": "fsdp"}),
    ("gpt2", {"sharding": "zero-1", "mixed_precision": "bf16"}),
    ("gpt2", {"sharding": "zero-3", "checkpoint_activations": True}),
    ("albert", {"sharding": "zero-3"}),
    ("flat", {"sharding": "fsdp"}),
]


def every_stack(offload: tuple[bool, ...]) -> Iterator[dict]:
    """Yield every stack of switches that goes together, for a user's model of three steps."""
    precisions, checkpointed, ranks = (None, "bf16", "fp16"), (False, True), (0, 4)
    for row in itertools.product(SHARDINGS, precisions, checkpointed, ranks, offload):
        names = ("sharding", "mixed_precision", "checkpoint_activations", "lora_rank", "cpu_offload")
        yield {name: value for name, value in zip(names, row, strict=True) if value}


def title(kind: str, words: dict) -> str:
    """Return the name of a run."""
    return " ".join([kind, *(f"{name}={value}" for name, value in words.items())])


def runs(device: str) -> Iterator[tuple[str, Callable[[], list[float]]]]:
    """Yield (name, run) of each run on this rank's device."""
    import torch

    from megatron_npu.switches import Switches
    from tests.acceleration.training import resumed, run

    here = torch.device(device)
    npu = device != "cpu"
    long = LONG if not npu else [(kind, words) for kind, words in LONG if kind in ("bert", "gpt2")]
    for kind, words in long:
        yield title(kind, words), lambda kind=kind, words=words: run(kind, Switches(**words), STEPS, here)
    stacks = list(every_stack((False, True) if npu else (False,)))
    for words in stacks[:: 4 if npu else 1]:
        yield title("user", words), lambda words=words: run("user", Switches(**words), FEW, here)
    for sharding in ("none", "zero-1", "fsdp"):
        name, switches = f"ready {sharding}", Switches(sharding=sharding)
        yield name, lambda switches=switches: run("user", switches, FEW, here, ready=True)
    for pair in RESUMED if not npu else RESUMED[:1]:
        first, then = (Switches(sharding=sharding, cpu_offload=npu) for sharding in pair)
        folder = str(Path(tempfile.gettempdir()) / f"{os.getppid()}-{'-'.join(pair)}")
        yield (
            f"resumed {' '.join(pair)}",
            lambda first=first, then=then, folder=folder: resumed("bert", first, then, 6, here, folder),
        )


def main() -> None:
    """Be one rank: try everything, note what comes of it."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, device = Path(sys.argv[1]), sys.argv[2]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tempfile.tempdir = str(folder)
    if device != "cpu":
        torch.npu.set_device(rank)
        device = f"{device}:{rank}"
    store = dist.FileStore(os.environ["RENDEZVOUS"], ranks)
    backend = "gloo" if device == "cpu" else "hccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    found: dict[str, object] = {}
    for name, attempt in runs(device):
        try:
            found[name] = attempt()
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
