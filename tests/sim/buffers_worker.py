"""Messages and HCCL's buffers of each group in runs of the driver, with --hccl-group-buffer-adaptive.

Usage (by tests/sim/ranks.py): buffers_worker.py CASES.json FOLDER FLAGS..., with CASES {name: words}. Each
case runs with the flag and without; both must log the same losses to the bit. No message may be larger than
what was computed for its group; rank 0 writes FOLDER/buffers.json: by case the bytes of all buffers without
and with the flag, and by group its largest message, what was computed, and its buffers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

import megatron_npu
from megatron_npu.adaptors.shared import communicators
from megatron_npu.options import hccl_buffers, hccl_messages
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import initialize, pretrain
from tests.support import tiny

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NAMES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "mp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "DATA_PARALLEL_GROUP": "dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "ep_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep_mp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt_instance",
}
LEFT = ("default_pg", "pair", "undefined")  # the world, and what is made for a moment
SMALL = 1 << 20  # a buffer of HCCL's smallest size holds it, whatever was computed


def train(flags: list[str], log: Path, last: int) -> dict[str, tuple[int, int, int]]:
    """Train; return of each group its largest message, what was computed, and the bytes of its buffers."""
    from megatron_npu.sim import counting

    found: dict[str, tuple[int, int, int]] = {}
    args = arguments.parse(["--json-log", str(log), *flags])
    buckets: dict[str, int] = {}
    fit = communicators.fit_buffer

    def note(group: dist.ProcessGroup, message: int, name: str) -> None:
        buckets[name] = max(message, buckets.get(name, 0))
        fit(group, message, name)

    def look(iteration: int, chunks: list) -> None:
        if iteration != last:
            return
        run = hccl_buffers.of_run()
        computed = {} if run is None else run.largest_messages()
        computed |= buckets
        with counting() as counts:
            pass
        for name, group in counts.groups.items():
            if group.buffer:
                size = computed.get(NAMES.get(name, name), computed.get(name, 0))
                found[name] = (group.largest, size, group.buffer)

    communicators.fit_buffer = note
    try:
        pretrain.train(args, on_gradients=look)
    finally:
        communicators.fit_buffer = fit
    dist.barrier()
    for group in [*dist.distributed_c10d._world.pg_map]:  # the driver keeps them in a caller's world
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return found


def check(case: str, found: dict[str, tuple[int, int, int]]) -> None:
    for name, (largest, computed, buffer) in found.items():
        if name.partition(" ")[0] in LEFT:
            continue
        assert computed, (case, name, found)
        assert largest <= max(computed, SMALL if computed == hccl_messages._FEW else 0), (case, name, found)
        assert buffer == 2 * hccl_buffers.size_of(computed) << 20, (case, name, found)


def main() -> None:
    cases, folder, flags = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3:]
    megatron_npu.install()
    import torch

    torch.npu.set_device(RANK)
    dist.init_process_group(
        "hccl", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=RANK, world_size=RANKS
    )
    initialize.silence_known_warnings()
    result = {}
    for case, words in cases.items():
        logs = [folder / f"{case}-{kind}.jsonl" for kind in ("default", "adaptive")]
        given = [*flags, *words.split()]
        last = int(given[len(given) - given[::-1].index("--train-iters")])
        before = train(given, logs[0], last)
        after = train([*given, hccl_buffers.FLAG], logs[1], last)
        print(RANK, case, after, flush=True)
        check(case, after)
        if RANK == 0:
            losses = [[row["loss"] for row in tiny.rows(log)] for log in logs]
            assert losses[0] == losses[1], (case, losses)
            assert len(losses[0]) == last, (case, losses)
            sizes = [sum(buffer for *_, buffer in each.values()) for each in (before, after)]
            result[case] = {"before": sizes[0], "after": sizes[1], "groups": after}
            (folder / "buffers.json").write_text(json.dumps(result, indent=1))
    print(f"rank {RANK}: done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
