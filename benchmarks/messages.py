"""Launches, peak memory and HCCL messages of a training step in parallel layouts, on simulated NPUs.

    python benchmarks/messages.py
    python benchmarks/messages.py --layouts tp2 tp2-overlap

A step of a Llama-style megatron-core GPT in bf16 (RMSNorm, SwiGLU, rotary positions) under Megatron's own
schedule: forward and backward passes of the micro-batches and the gradient reduction, without the optimizer.
The second step is counted, because the first one creates the communicators. For each layout: launches and
peak memory of the rank with the most; and for each process group the calls, the bytes that a rank passes to
them, and the device memory that HCCL holds for the group (docs/explanation/simulator.md). Results go to
benchmarks/results/messages.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import report

SEQUENCE, HIDDEN, VOCABULARY, MICRO_BATCHES = 1024, 512, 512, 4


class Layout(NamedTuple):
    """A parallel layout: ranks, arguments of ``initialize_model_parallel``, and model options."""

    ranks: int
    parallel: dict[str, Any]
    options: dict[str, Any]
    layers: int = 2


_SEQUENCE_PARALLEL = {"sequence_parallel": True}

LAYOUTS = {
    "one": Layout(1, {}, {}),
    "pp2": Layout(2, {"pipeline_model_parallel_size": 2}, {}, layers=4),
    "tp2": Layout(2, {"tensor_model_parallel_size": 2}, _SEQUENCE_PARALLEL),
    "tp2-overlap": Layout(
        2, {"tensor_model_parallel_size": 2}, {**_SEQUENCE_PARALLEL, "tp_comm_overlap": True}
    ),
    "cp4-p2p": Layout(4, {"context_parallel_size": 4}, {"cp_comm_type": "p2p"}),
    "cp4-a2a": Layout(4, {"context_parallel_size": 4}, {"cp_comm_type": "a2a"}),
    "cp4-a2a+p2p": Layout(
        4,
        {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
        {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]},
    ),
    "cp4-p2p-window": Layout(
        4, {"context_parallel_size": 4}, {"cp_comm_type": "p2p", "window_size": (63, 0)}
    ),
    "cp4-all_gather": Layout(4, {"context_parallel_size": 4}, {"cp_comm_type": "all_gather"}),
}


def main() -> None:
    """Measure each layout on its ranks, and write the result; or run one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(LAYOUTS[arguments.layouts[0]], arguments.rank, arguments.store)), flush=True)
        return
    from megatron_npu.upstream import megatrons

    rows = {name: whole(run_ranks(name, LAYOUTS[name].ranks)) for name in arguments.layouts}
    for name, row in rows.items():
        print("\n".join(table(name, row)), flush=True)
    result = {"sequence": SEQUENCE, "hidden": HIDDEN, "micro_batches": MICRO_BATCHES, "layouts": rows}
    name = "messages.json" if arguments.layouts == list(LAYOUTS) else "messages-some.json"
    report.write(report.RESULTS / name, result, megatron=megatrons.find(None).version)


def run_ranks(name: str, ranks: int) -> list[dict[str, Any]]:
    """Return the counts of each rank of a layout."""
    command = [sys.executable, "-m", "megatron_npu", "sim", "--devices", str(ranks), "--", sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command += [__file__, "--layouts", name, "--store", str(Path(folder) / "store")]
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"a rank of {name} failed")
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def whole(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of a layout: the maximum over the ranks for each of them."""
    found: dict[str, Any] = {
        name: max(rank[name] for rank in ranks) for name in ("launches", "peak", "calls", "bytes", "buffers")
    }
    found["groups"] = {}
    for rank in ranks:
        for name, group in rank["groups"].items():
            known = found["groups"].setdefault(name, group)
            found["groups"][name] = {key: max(known[key], group[key]) for key in group}
    return found


def table(name: str, row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about one layout."""
    yield (
        f"{name:<16} {row['launches']:5} launches, {row['peak'] / 2**20:7.2f} MiB peak, {row['calls']:4} "
        f"messages, {row['bytes'] / 2**20:8.3f} MiB sent, {row['buffers'] >> 20} MiB of HCCL's buffers"
    )
    for group, cost in row["groups"].items():
        yield f"    {group:<40} {cost['calls']:4} messages, {cost['bytes'] / 2**20:8.3f} MiB"


def measure(layout: Layout, rank: int, store: str) -> dict[str, Any]:
    """Run one rank of a layout; return the cost of its second step."""
    import megatron_npu
    from megatron_npu.sim import counting

    megatron_npu.install()
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=layout.ranks
    )
    parallel_state.initialize_model_parallel(**layout.parallel)
    step = prepare(layout)
    step()
    with counting() as counts:
        step()
    torch.distributed.barrier()
    total = counts.total_communication
    groups = {name: asdict(group) for name, group in counts.groups.items() if group.calls}
    return {
        "launches": counts.total_launches,
        "peak": counts.peak,
        "calls": total.calls,
        "bytes": total.bytes,
        "buffers": counts.buffers,
        "groups": groups,
    }


def prepare(layout: Layout) -> Any:
    """Return a function that runs one step without the optimizer."""
    import launches
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parts = parallel_state.get_context_parallel_world_size()
    options = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parts,
        "hidden_size": HIDDEN,
        "num_query_groups": launches.HEADS,  # a2a gives every rank a head of the keys
        **launches.FUSED,
        **layout.options,
    }
    model, _ = launches.build("llama", layout.layers, SEQUENCE, VOCABULARY, None, **options)
    model.config.finalize_model_grads_func = None
    length = SEQUENCE // parts
    tokens = torch.randint(0, VOCABULARY, (1, length + 1), device="cuda")
    positions = torch.arange(length, device="cuda")[None]

    def forward(_: Any, model: Any) -> tuple:
        def loss(output: torch.Tensor) -> tuple:
            mean = output.float().mean()
            return mean, {"loss": mean.detach()}

        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), loss

    run = get_forward_backward_func()

    def step() -> None:
        model.zero_grad_buffer()
        run(
            forward_step_func=forward,
            data_iterator=None,
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        model.finish_grad_sync()

    return step


if __name__ == "__main__":
    main()
