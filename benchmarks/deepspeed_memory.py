"""Memory of a rank with DeepSpeed's ZeRO, counted on simulated NPUs.

    export MEGATRON_LM_PATH=TREE
    megatron-npu sim --devices 4 -- python benchmarks/deepspeed_memory.py [--ranks 2 4] [--model NAME]

It runs the unedited ``pretrain_gpt.py`` of deepspeedai's Megatron-DeepSpeed in bf16 with fp32 main weights
and Adam, with two micro-batches per step. There are N weights: each takes 2 bytes, its gradient 2, its main
weight and two moments 12; there are W ranks. The counts are the bytes between steps, and those between the
micro-batches of a step, after the first one's activations are freed and while its gradients exist.

    scheme                       between steps           between micro-batches
    zero-0                       14 N                    16 N
    zero-1                       2 N + 12 N / W          4 N + 12 N / W
    zero-2                       2 N + 12 N / W          2 N + 14 N / W
    zero-3                       16 N / W                the same: its gradients have separate memory
    zero-1, cpu offload          2 N                     4 N: gradients go to the host after the last
    zero-2, cpu offload          2 N                     2 N: after each
    zero-3, cpu offload          2 N / W                 2 N / W

In addition, all layers share a mask of 4 MiB. DeepSpeed's buckets are made small. Peaks, which depend on
DeepSpeed's temporary copies during the optimizer step, are also recorded. Results go to
benchmarks/results/deepspeed-memory.json, and those for two layers of GPT-2 345M to a file with its name.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from forks import fork

SCHEMES = {
    "zero-0": (0, False),
    "zero-1": (1, False),
    "zero-2": (2, False),
    "zero-3": (3, False),
    "zero-1, cpu offload": (1, True),
    "zero-2, cpu offload": (2, True),
    "zero-3, cpu offload": (3, True),
}
MODELS = {
    "small": {"layers": 6, "hidden": 256, "heads": 4, "length": 32, "vocabulary": 255},
    "345m-2-layers": {"layers": 2, "hidden": 1024, "heads": 16, "length": 32, "vocabulary": 50256},
}
SIZES = MODELS["small"].copy()  # of this run
STEPS = 3
MASK = 2048 * 2048
BUCKET = 2**15  # elements of DeepSpeed's buckets, whose default of 5e8 is larger than the model


def arithmetic(scheme: str, ranks: int, weights: int) -> dict[str, float]:
    """Return the bytes ``between_steps`` and ``between_micro_batches`` according to the table above."""
    stage, offload = SCHEMES[scheme]
    states = 0.0 if offload else 12 / (ranks if stage else 1)
    half = 2 / (ranks if stage == 3 else 1)
    gradients = 0.0 if offload and stage > 1 else 2 / (ranks if stage >= 2 else 1)
    held = half + states + (gradients if stage == 3 else 0)
    return {
        "between_steps": held * weights + MASK,
        "between_micro_batches": (half + states + gradients) * weights + MASK,
    }


def configuration(scheme: str, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    stage, offload = SCHEMES[scheme]
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), BUCKET
    )
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 2 * ranks,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }


def flags(folder: Path, scheme: str, ranks: int) -> list[str]:
    """Write DeepSpeed's configuration; return the script's flags."""
    file = folder / "deepspeed.json"
    file.write_text(json.dumps(configuration(scheme, ranks)))
    length = SIZES["length"]
    return [
        *f"--num-layers {SIZES['layers']} --hidden-size {SIZES['hidden']}".split(),
        *f"--num-attention-heads {SIZES['heads']} --vocab-size {SIZES['vocabulary']}".split(),
        *f"--seq-length {length} --max-position-embeddings {length}".split(),
        *f"--micro-batch-size 1 --global-batch-size {2 * ranks}".split(),
        *f"--lr 1e-3 --train-iters {STEPS} --lr-decay-iters {STEPS} --eval-iters 0 --bf16".split(),
        *f"--split 100,0,0 --num-workers 0 --data-path {folder.parent}/text".split(),
        *"--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --no-pipeline-parallel".split(),
        *f"--deepspeed --deepspeed_config {file} --zero-stage {SCHEMES[scheme][0]}".split(),
    ]


def measure(tree: Path, scheme: str, ranks: int, top: Path) -> dict[str, int]:
    """Return the counts of the rank with the most memory between steps; each rank is a process."""
    import torch.distributed as dist

    folder = top / f"{scheme}-{ranks}".replace(", ", "-").replace(" ", "-")
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = functools.partial(be_a_rank, tree, scheme, ranks, store.port, folder)
    fork(start, ranks, f"{scheme} on {ranks} ranks")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return max(found, key=lambda one: one["between_steps"])


def be_a_rank(tree: Path, scheme: str, ranks: int, port: int, folder: Path, rank: int) -> None:
    """Train in this process; write the counts of the last step."""
    import torch
    from megatron import training

    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(sizes, RANK=str(rank), LOCAL_RANK=str(rank), **address)
    torch.npu.set_device(rank)
    seen: dict[str, int] = {}
    training.train_step = counting(training.train_step, seen)
    sys.argv = [str(tree / "pretrain_gpt.py"), *flags(folder, scheme, ranks)]
    runpy.run_path(sys.argv[0], run_name="__main__")
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def counting(train_step: Callable[..., Any], seen: dict[str, int]) -> Callable[..., Any]:
    """Wrap upstream's ``train_step`` so that the last call writes its counts into ``seen``."""
    from torch import npu

    steps = iter(range(STEPS))

    def counted(forward_step: Any, iterator: Any, model: list[Any], *args: Any, **kwargs: Any) -> Any:
        if next(steps) < STEPS - 1:
            return train_step(forward_step, iterator, model, *args, **kwargs)
        (engine,) = model
        backward = engine.backward

        def backward_once(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            seen.setdefault("between_micro_batches", npu.memory_allocated())
            return result

        engine.backward = backward_once
        sizes = [getattr(weight, "ds_numel", weight.numel()) for weight in engine.module.parameters()]
        seen.update(weights=sum(sizes), between_steps=npu.memory_allocated())
        npu.reset_peak_memory_stats()
        result = train_step(forward_step, iterator, model, *args, **kwargs)
        seen["peak"] = npu.max_memory_allocated()
        return result

    return counted


def compare(tree: Path, ranks: int, schemes: list[str], top: Path) -> dict[str, dict[str, Any]]:
    """Return scheme -> counted bytes, the two calculated values, and the ratios."""
    rows: dict[str, dict[str, Any]] = {}
    for scheme in schemes:
        found = measure(tree, scheme, ranks, top)
        expected = arithmetic(scheme, ranks, found["weights"])
        ratios = {name: found[name] / value for name, value in expected.items()}
        rows[scheme] = {"measured": found, "arithmetic": expected, "ratio": ratios}
        told = ", ".join(
            f"{name.replace('_', ' ')} {found[name] / 2**20:.2f} MiB, by arithmetic {value / 2**20:.2f}"
            for name, value in expected.items()
        )
        print(f"{ranks} ranks  {scheme:<22} {told}; peak {found['peak'] / 2**20:.2f}", file=sys.stderr)
    return rows


def write_dataset(prefix: Path) -> None:
    """Write documents of consecutive numbers."""
    from megatron_npu.data.preprocessing import indexed_dataset

    with indexed_dataset.Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for start in range(100):
            tokens = ((start + np.arange(100)) % SIZES["vocabulary"]).astype(np.uint16)
            writer.add(tokens.tobytes(), np.array([100], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])


def main() -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--output", type=Path, help="write to this file instead of benchmarks/results/…")
    arguments = parser.parse_args()
    SIZES.update(MODELS[arguments.model])
    tree = Path(os.environ["MEGATRON_LM_PATH"])
    from megatron_npu import plugin

    plugin.install()
    sys.path.insert(0, str(tree))
    import megatron.training  # noqa: F401  (once for all ranks)

    rows = {}
    with tempfile.TemporaryDirectory() as top:
        write_dataset(Path(top) / "text")
        for ranks in arguments.ranks:
            rows[str(ranks)] = compare(tree, ranks, arguments.schemes, Path(top))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows))
    else:
        write(rows, arguments.model)


def write(rows: dict[str, Any], model: str) -> None:
    """Write the results for a model to a separate file."""
    import deepspeed
    import report

    versions = {"torch_npu": sys.modules["torch_npu"].__version__, "deepspeed": deepspeed.__version__}
    name = "deepspeed-memory" if model == "small" else f"deepspeed-memory-{model}"
    file = report.RESULTS / f"{name}.json"
    report.write(file, {"threads": 1, "model": {**SIZES, "dtype": "bf16"}, "ranks": rows}, **versions)


if __name__ == "__main__":
    main()
