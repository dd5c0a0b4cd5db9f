"""The cost of `megatron-npu plan` for large jobs: process groups of many ranks, and ranks of large models.

    python -m benchmarks.plan_scale [--part groups] [--part shapes] --output FILE

``groups``: CPU seconds in which one process creates Megatron's process groups, with the plug-in, at world
sizes 256, 1,024 and 10,000 on torch's fake process group, each in a separate process, and the part spent in
this package's files. ``shapes``: seconds and memory of the first and last kind of rank that `plan` runs for
Llama-2-70B, Llama-3.1-405B and DeepSeek-V3, on simulated NPUs in dry mode. ``--page`` writes
docs/records/plan-scale.md from FILE.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import os
import pstats
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_npu.base import files
from megatron_npu.planning.job import Job
from megatron_npu.planning.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "records" / "plan-scale.md"
WORLDS = (256, 1024, 10_000)
_CORE = ROOT / "checkouts" / "core_v0.16.1"
_ALL = (
    "--bf16 --lr 1e-4 --train-iters 100 --mock-data --tokenizer-type NullTokenizer --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer "
    "--sequence-parallel --micro-batch-size 1 --eval-iters 0"
)
_LLAMA = f"{_ALL} --group-query-attention --num-query-groups 8 --tensor-model-parallel-size 8"
_DEEPSEEK = (
    f"{_ALL} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129280 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --moe-layer-freq ([0]*3+[1]*58) --moe-shared-expert-intermediate-size 2048 "
    "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 16 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--pipeline-model-parallel-layout Et*2|t|(tt|)*29mL --global-batch-size 8192 --eval-interval 100"
)
SHAPES: dict[str, tuple[int, list[str], str]] = {  # devices, program, words
    "Llama-2-70B": (
        1024,
        ["pretrain"],
        f"{_LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 "
        "--pipeline-model-parallel-size 4 --global-batch-size 1024",
    ),
    "Llama-3.1-405B": (
        10_240,
        ["pretrain"],
        f"{_LLAMA} --num-layers 128 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
        "--seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 "
        "--pipeline-model-parallel-size 16 --global-batch-size 2560",
    ),
    "DeepSeek-V3": (1024, [str(_CORE / "pretrain_gpt.py")], _DEEPSEEK),
}


def groups(world: int) -> dict[str, Any]:
    """Start the plug-in and create all process groups of a rank in the middle of a world; return the cost."""
    os.environ |= {"RANK": str(world // 2), "WORLD_SIZE": str(world)}
    import torch.distributed as dist

    from megatron_npu import plugin
    from megatron_npu.planning.rank import process_groups

    profile = cProfile.Profile()
    plugin.install()
    from megatron.core import parallel_state

    with process_groups.absent(lambda _: "fake"):
        dist.init_process_group("fake")
        begin = time.process_time()
        profile.enable()
        parallel_state.initialize_model_parallel(8, 2)
        profile.disable()
        made = time.process_time() - begin
    found = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    own = sum(entry[2] for (file, _, _), entry in found if "/megatron_npu/" in file)
    calls = sum(entry[0] for (_, _, name), entry in found if name == "new_group")
    return {
        "world": world,
        "groups_s": round(made, 3),
        "own_s": round(own, 3),
        "new_group_calls": calls,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def shape(name: str, device: Ranks) -> dict[str, Any]:
    """Plan the first and the last kind of rank of a model; return the cost."""
    devices, program, words = SHAPES[name]
    if program != ["pretrain"]:
        device = replace(device, environment=device.environment | {"MEGATRON_LM_PATH": str(_CORE)})
    with mock.patch.dict(os.environ, device.environment):
        job = Job.of(devices, [*program, *words.split()])
    kinds = job.representatives()
    begin = time.monotonic()
    reading = job.representatives(by_batch=False)
    found = device.run(job, dict.fromkeys((min(reading), max(reading))))
    kept = ("seconds", "processor", "resident", "peak", "reserved", "error", "code", "routing_most")
    rows = [{"rank": rank} | {key: row.get(key) for key in kept} for rank, row in found.items()]
    failed = next((row for row in found.values() if row.get("error") or row.get("code")), None)
    said = {"devices": devices, "kinds": len(kinds), "seconds": round(time.monotonic() - begin, 1)}
    return said | ({"ranks": rows} if failed is None else {"failed": failed["log"][-2000:]})


def page(found: dict[str, Any]) -> str:
    """Return the page for a record."""
    gib = 1 << 30
    lines = [
        "# Plans of large jobs",
        "",
        "For reviewers: what `megatron-npu plan` takes for large jobs, and its start at 10,000 ranks.",
        "",
        "```bash",
        "python -m benchmarks.plan_scale --output benchmarks/results/plan/scale.json --page",
        "```",
        "",
        f"{found['date']}, commit {found['commit']}, two cores that others used as well: seconds are of the",
        "processor, not of a clock.",
        "",
        "## Process groups of one rank",
        "",
        "Tensor 8, pipeline 2, the rest data parallel; megatron-core 0.16.1, torch's fake process group.",
        "",
        "| world | calls of new_group | all groups, s | of it in our files, s | resident, MB |",
        "|---|---|---|---|---|",
    ]
    for row in found.get("groups", []):
        lines.append(
            f"| {row['world']:,} | {row['new_group_calls']:,} | {row['groups_s']} | "
            f"{row['own_s']} | {row['resident'] >> 20:,} |"
        )
    lines += [
        "",
        "## Ranks of large models",
        "",
        "The first and the last kind of each job; bytes are of these two.",
        "",
    ]
    lines += ["| model | devices | kinds of rank | seconds each | GB resident | peak, GiB | reserved, GiB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, row in found.get("shapes", {}).items():
        if "failed" in row:
            lines.append(f"| {name} | {SHAPES[name][0]:,} | did not run | | | | |")
            continue
        ranks = row["ranks"]

        def span(key: str, unit: float, ranks: list[dict[str, Any]] = ranks) -> str:
            values = sorted(each[key] / unit for each in ranks)
            return f"{values[0]:.1f} to {values[-1]:.1f}"

        lines.append(
            f"| {name} | {row['devices']:,} | {row['kinds']} | {span('processor', 1)} | "
            f"{span('resident', 1e9)} | {span('peak', gib)} | {span('reserved', gib)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="*", choices=("groups", "shapes"), default=["groups", "shapes"])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--page", action="store_true", help="also write the documentation page")
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.world:
        print(json.dumps(groups(options.world)))
        return 0
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    if "groups" in options.part:
        found["groups"] = []
        for world in WORLDS:
            command = [sys.executable, "-m", "benchmarks.plan_scale", "--output", "-", "--world", str(world)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found["groups"].append(json.loads(said.splitlines()[-1]))
            print(found["groups"][-1], flush=True)
    if "shapes" in options.part:
        device = Ranks.on("npu")
        for name in options.shape:
            found.setdefault("shapes", {})[name] = shape(name, device)
            print(name, found["shapes"][name], flush=True)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    found["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    files.write(options.output, json.dumps(found, indent=1) + "\n")
    if options.page:
        files.write(PAGE, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
