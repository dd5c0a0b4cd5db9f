"""Combinations of switches to test on a model; run as a program, two ranks test them in turn.

``stacks.py FOLDER DEVICE`` writes ``FOLDER/RANK.json``: a mapping from the name of a run to its losses or its
error. Modules are imported once, before the ranks are forked.
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

Runs = Callable[[str], Iterator[tuple[str, Callable[[], list[float]]]]]
STEPS, FEW = 10, 2  # of a run; of each stack of all that go together
SHARDINGS = ("none", "zero-1", "zero-2", "zero-3", "fsdp")
READY = ("none", "zero-1", "fsdp")
RESUMED = (("zero-1", "fsdp"), ("fsdp", "none"), ("none", "zero-2"), ("zero-2", "zero-1"))

# the name of a model and of the switches: each STEPS long, on several ranks
LONG = [
    ("bert", {}),
    ("bert", {"sharding": "zero-1"}),
    ("bert", {"sharding": "zero-2"}),
    ("bert", {"sharding": "fsdp"}),
    ("bert", {"sharding": "zero-3", "mixed_precision": "bf16", "checkpoint_activations": True}),
    ("bert", {"sharding": "zero-1", "mixed_precision": "fp16"}),
    ("bert", {"sharding": "fsdp", "lora_rank": 4}),
    ("bert tokens", {"sharding": "fsdp"}),
    ("gpt2", {"sharding": "zero-1", "mixed_precision": "bf16", "fused_ops": True}),
    ("gpt2", {"sharding": "zero-3", "checkpoint_activations": True, "fused_ops": True}),
    ("bert", {"sharding": "zero-2", "mixed_precision": "bf16", "fused_ops": True}),
    ("bert", {"sharding": "fsdp", "lora_rank": 4, "fused_ops": True}),
    ("albert", {"sharding": "zero-3"}),
    ("flat", {"sharding": "fsdp"}),
]
# and on simulated NPUs
LONG_ON_NPU = [
    ("bert", {"sharding": "zero-1", "cpu_offload": True}),
    ("gpt2", {"sharding": "fsdp", "mixed_precision": "bf16", "cpu_offload": True, "fused_ops": True}),
]


def every_stack(offload: tuple[bool, ...]) -> Iterator[dict]:
    """Yield every valid combination of switches, for a user's model that is trained for three steps."""
    precisions, checkpointed, ranks = (None, "bf16", "fp16"), (False, True), (0, 4)
    for row in itertools.product(SHARDINGS, precisions, checkpointed, ranks, offload):
        names = ("sharding", "mixed_precision", "checkpoint_activations", "lora_rank", "cpu_offload")
        yield {name: value for name, value in zip(names, row, strict=True) if value}


def on_one_rank() -> list[dict]:
    """Return the combinations for a single rank, on which sharding has no effect."""
    return [words for words in every_stack((False,)) if words["sharding"] in ("none", "zero-3")]


def on_two_ranks() -> list[dict]:
    """Return the combinations for two ranks; to save time, recomputation and LoRA are only used together."""
    both = ("checkpoint_activations", "lora_rank")
    return [words for words in every_stack((False,)) if sum(name in words for name in both) != 1]


def on_npu() -> list[dict]:
    """Return every eleventh of these combinations, because each takes seconds there."""
    return list(every_stack((False, True)))[::11]


def title(kind: str, words: dict) -> str:
    """Return the name of a run."""
    return " ".join([kind, *(f"{name}={value}" for name, value in words.items())])


def runs(device: str) -> Iterator[tuple[str, Callable[[], list[float]]]]:
    """Yield the name and the run of each combination on this rank's device."""
    import torch

    from megatron_npu.options.switches import Switches
    from tests.support.train_script import resumed, run

    here = torch.device(device)
    npu = device != "cpu"
    for kind, words in LONG_ON_NPU if npu else LONG:
        yield title(kind, words), lambda kind=kind, words=words: run(kind, Switches(**words), STEPS, here)
    for words in on_npu() if npu else on_two_ranks():
        yield title("user", words), lambda words=words: run("user", Switches(**words), FEW, here)
    for sharding in () if npu else READY:
        name, switches = f"ready {sharding}", Switches(sharding=sharding)
        yield name, lambda switches=switches: run("user", switches, FEW, here, ready=True)
    for pair in RESUMED[:1] if npu else RESUMED:
        first, then = (Switches(sharding=sharding, cpu_offload=npu) for sharding in pair)
        folder = str(Path(tempfile.gettempdir()) / f"{os.getppid()}-{'-'.join(pair)}")
        yield (
            f"resumed {' '.join(pair)}",
            lambda first=first, then=then, folder=folder: resumed("bert", first, then, 6, here, folder),
        )


def be_rank(rank: int, ranks: int, folder: Path, device: str, runs: Runs) -> None:
    """Run as one rank: test everything and record the results."""
    import torch
    import torch.distributed as dist

    from tests.support.warm import one_device

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    one_device.share()  # the groups of all runs, some of which are garbage
    tempfile.tempdir = str(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    backend = "gloo"
    if device != "cpu":
        torch.npu.set_device(rank)
        device, backend = f"{device}:{rank}", "cpu:gloo,npu:hccl"
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    found: dict[str, object] = {}
    for name, attempt in runs(device):
        try:
            found[name] = attempt()
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def fork(ranks: int, folder: Path, device: str, runs: Runs) -> int:
    """Fork the ranks, let each of them test the runs, and return the worst of their results."""
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            end = 1
            try:
                be_rank(rank, ranks, folder, device, runs)
                end = 0
            except Exception:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(end)
        processes.append(process)
    return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)


def main() -> int:
    """Import the required modules, and return the worst of the ranks' results."""
    import peft  # noqa: F401

    import megatron_npu.finetune.model.prepare  # noqa: F401
    from tests.support.finetune_models import KINDS

    for kind in KINDS.values():
        kind.model()
    return fork(2, Path(sys.argv[1]), sys.argv[2], runs)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
