"""Peak memory of a rank with the switches of `megatron-npu train`, counted on simulated NPUs.

    megatron-npu sim --devices 4 -- python benchmarks/train_memory.py [--ranks 2 4]

A Transformers GPT-2 in fp32 with AdamW: a weight takes 4 bytes, its gradient 4, its two moments 8. Of N
weights, R are outside the blocks and B in each of L blocks; there are W ranks. Peaks are those of whole steps
(forward, backward, clipping, optimizer) after the first three. torch_npu's allocator counts every byte.

    scheme                  calculated bytes at the peak
    none                    16 N + A: weights, gradients (DDP's buckets stay), moments; A: activations
    zero-1                  8 N + 8 N / W + A: a rank has the moments of its rows
    zero-2                  4 N + 12 N / W + A: full weights, shards of weights and moments; no gradients yet
    zero-3, fsdp            4 R + 8 B + 12 N / W + A before the backward pass: two blocks and R are full; or
                            8 R + 12 B + 16 N / W + a at its end: R and a block, their gradients, one buffer
    cpu offload             the same without moments; with zero-2 and zero-3 without any shards
    checkpoint activations  A - (L - 1) a + L x: a, the activations of a block; x, its input

A and a are measured without any switch: the memory above 16 N, and what another block adds to it. Each scheme
runs in separate processes. Results go to benchmarks/results/memory-of-training.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forks import fork

SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "zero-1": {"sharding": "zero-1"},
    "zero-2": {"sharding": "zero-2"},
    "zero-3": {"sharding": "zero-3"},
    "fsdp": {"sharding": "fsdp"},
    "cpu offload": {"cpu_offload": True},
    "zero-1, cpu offload": {"sharding": "zero-1", "cpu_offload": True},
    "zero-2, cpu offload": {"sharding": "zero-2", "cpu_offload": True},
    "fsdp, cpu offload": {"sharding": "fsdp", "cpu_offload": True},
    "checkpoint activations": {"checkpoint_activations": True},
    "fsdp, checkpoint activations": {"sharding": "fsdp", "checkpoint_activations": True},
}
HIDDEN, HEADS, VOCABULARY = 128, 4, 512
STEPS = 4


@dataclass(frozen=True)
class Sizes:
    """The model and its batch: ``layers`` blocks, ``length`` tokens, one sample."""

    layers: int = 12
    length: int = 64


@dataclass
class Measured:
    """Memory of one rank.

    Attributes:
        peak: peak bytes over whole steps.
        weights: N.
        outside: R.
    """

    peak: int
    weights: int
    outside: int


def arithmetic(scheme: str, ranks: int, sizes: Sizes, plain: Measured, activations: int, block: int) -> float:
    """Return the bytes at the peak according to the table above.

    Args:
        scheme: a name from ``SCHEMES``.
        ranks: W.
        sizes: the model's sizes.
        plain: the run without any switch, which provides the numbers of weights.
        activations, block: A and a.
    """
    words = SCHEMES[scheme]
    sharding, offload = words.get("sharding", "none"), words.get("cpu_offload", False)
    n, outside = plain.weights, plain.outside
    if words.get("checkpoint_activations"):
        inputs = 4 * sizes.length * HIDDEN
        activations += sizes.layers * inputs - (sizes.layers - 1) * block
    if sharding in ("none", "zero-1"):
        moments = 0 if offload else 8 * n / (ranks if sharding == "zero-1" else 1)
        return 8 * n + moments + activations
    shards = 0 if offload else 4 * n / ranks
    if sharding == "zero-2":
        return 4 * n + 3 * shards + activations
    one = (n - outside) / sizes.layers
    before = 4 * outside + 8 * one + 3 * shards + activations
    return max(before, 8 * outside + 12 * one + 4 * shards + block)


def measure(scheme: str, ranks: int, sizes: Sizes) -> Measured:
    """Return the largest of the ranks' peaks; each rank is a process."""
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(_be_a_rank, scheme, ranks, sizes, Path(folder))
        fork(start, ranks, f"{scheme} on {ranks} ranks")
        found = [Measured(**json.loads((Path(folder) / f"{rank}.json").read_text())) for rank in range(ranks)]
    return max(found, key=lambda one: one.peak)


def _be_a_rank(scheme: str, ranks: int, sizes: Sizes, folder: Path, rank: int) -> None:
    """Take the steps in this process; write its memory use."""
    import torch
    import torch.distributed as dist

    from megatron_npu.finetune.model.prepare import prepare
    from megatron_npu.options.switches import Switches

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    device = torch.device("npu", rank)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=ranks)
    ids = torch.randint(0, VOCABULARY, (1, sizes.length), device=device)
    before = torch.npu.memory_allocated()
    made = prepare(gpt2(sizes), None, None, Switches(**SCHEMES[scheme]), device=device, clip_grad=1.0)
    weights = sum(parameter.numel() for parameter in made.module.parameters())
    blocks = sum(parameter.numel() for parameter in made.module.transformer.h.parameters())
    for step in range(STEPS):
        if step == STEPS - 1:
            torch.npu.reset_peak_memory_stats()
        with made.accumulating(last=True), made.forward_context():
            loss = made.model(input_ids=ids, labels=ids).loss
            made.backward(loss)
        made.step()
    peak = torch.npu.max_memory_allocated() - before
    dist.destroy_process_group()
    found = Measured(peak, weights, weights - blocks)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(found)))


def gpt2(sizes: Sizes) -> Any:
    """Return the model, with Transformers' own attention: torch_npu's keeps a 4 MiB mask per block."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_head": HEADS, "n_layer": sizes.layers}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    config = GPT2Config(
        **model, **no_dropout, **special, n_positions=sizes.length, attn_implementation="eager"
    )
    return GPT2LMHeadModel(config).train()


def compare(ranks: int, sizes: Sizes, schemes: list[str]) -> dict[str, dict[str, float]]:
    """Return scheme -> measured and calculated bytes, and the savings compared with no switch for both."""
    plain = measure("none", ranks, sizes)
    larger = measure("none", ranks, Sizes(sizes.layers + 1, sizes.length))
    activations = plain.peak - 16 * plain.weights
    block = larger.peak - 16 * larger.weights - activations
    rows: dict[str, dict[str, float]] = {}
    for scheme in schemes:
        found = plain if scheme == "none" else measure(scheme, ranks, sizes)
        expected = arithmetic(scheme, ranks, sizes, plain, activations, block)
        rows[scheme] = {"measured": found.peak, "arithmetic": expected, "ratio": found.peak / expected}
        if scheme != "none":
            rows[scheme]["saved"] = plain.peak - found.peak
            rows[scheme]["saved_ratio"] = (plain.peak - found.peak) / (plain.peak - expected)
        print(
            f"{ranks} ranks  {scheme:<28} {found.peak / 2**20:7.2f} MiB, by arithmetic "
            f"{expected / 2**20:7.2f} ({found.peak / expected:.3f})",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--output", type=Path, help="write to this file instead of benchmarks/results/…")
    arguments = parser.parse_args()
    import transformers

    gpt2(Sizes(1))  # imports it once for all ranks
    import megatron_npu.finetune.model.prepare  # noqa: F401  (the same)

    sizes = Sizes(arguments.layers)
    rows = {}
    for ranks in arguments.ranks:
        rows[str(ranks)] = compare(ranks, sizes, arguments.schemes)
        if arguments.output:
            arguments.output.write_text(json.dumps(rows))
        else:
            write(rows, sizes, transformers.__version__)


def write(rows: dict[str, Any], sizes: Sizes, transformers: str) -> None:
    """Write the results so far to the benchmark's own file."""
    import report

    model = {**asdict(sizes), "hidden": HIDDEN, "vocabulary": VOCABULARY, "dtype": "fp32"}
    versions = {"torch_npu": sys.modules["torch_npu"].__version__, "transformers": transformers}
    file = report.RESULTS / "memory-of-training.json"
    report.write(file, {"threads": 1, "model": model, "ranks": rows}, **versions)


if __name__ == "__main__":
    main()
