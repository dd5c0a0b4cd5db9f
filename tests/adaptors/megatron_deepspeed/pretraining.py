"""Short runs of the tree's ``pretrain_gpt.py``."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.adaptors.megatron_lm import runs

ITERATIONS = 6
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 32"


def train(tree: Path, data: Path, *changes: str, processes: int = 1) -> dict[int, float]:
    """Return the losses of a run of a tree's own script."""
    script, *flags = steps(tree, data, *changes)
    return runs.losses(runs.succeeded(runs.run(Path(script), flags, processes=processes)))


def steps(tree: Path, data: Path, *changes: str) -> list[str]:
    """Return script and flags of a short run."""
    more = " ".join(changes).split()
    return [str(tree / "pretrain_gpt.py"), *runs.flags(data), "--train-iters", str(ITERATIONS), *more]


def engine(folder: Path, stage: int) -> str:
    """Write a configuration of DeepSpeed; return the flags that name it."""
    path = folder / f"stage-{stage}.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": runs.BATCH}
    path.write_text(json.dumps({**sizes, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}))
    return f"--deepspeed --deepspeed_config {path} --zero-stage {stage}"


def split_into_stages(checkpoint: Path, stages: int) -> None:
    """Let a checkpoint of DeepSpeed's engine, whose weights are in a file per layer, be one of a pipeline.

    So two layouts can begin with the same weights; otherwise each stage draws its own.
    """
    (folder,) = (path for path in checkpoint.iterdir() if path.is_dir())
    first = folder / "mp_rank_00_model_states.pt"
    states = torch.load(first, weights_only=False)  # written by the run before
    states["args"].pipeline_model_parallel_size = states["mp_world_size"] = stages
    for rank in range(stages):
        torch.save(states, folder / f"mp_rank_{rank:02d}_model_states.pt")
