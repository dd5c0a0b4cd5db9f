"""tensor_ranks.py CHECKPOINT ITERATION RANKS TARGET: cut a checkpoint of one process for tensor parallelism.

The rows of the fused projection are query, key and value one after the other, in each rank its own. Upstream
draws them for one process and gives each rank a run of rows: another number of ranks has another model. Keys
and values of cross-attention are rows by head, of which each rank has a run.
"""

import sys
from pathlib import Path

import torch

LAST_DIMENSION = ("attention.dense.weight", "dense_4h_to_h.weight")
FIRST_DIMENSION = ("dense_h_to_4h.weight", "dense_h_to_4h.bias", "word_embeddings.weight", "lm_head.bias")
CROSS = tuple(
    f"inter_attention.{name}.{kind}" for name in ("query", "key_value") for kind in ("weight", "bias")
)
FUSED = ("query_key_value.weight", "query_key_value.bias")


def part(name: str, value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what a rank has of a parameter."""
    if name.endswith(FUSED):
        return torch.cat([third.chunk(ranks)[rank] for third in value.chunk(3)])
    if name.endswith(LAST_DIMENSION):
        return value.chunk(ranks, 1)[rank].contiguous()
    return value.chunk(ranks)[rank].contiguous() if name.endswith((*FIRST_DIMENSION, *CROSS)) else value


def cut(weights: object, rank: int, ranks: int, name: str = "") -> object:
    """Return a rank's part of nested dictionaries of parameters."""
    if isinstance(weights, dict):
        return {key: cut(value, rank, ranks, f"{name}.{key}") for key, value in weights.items()}
    return part(name, weights, rank, ranks) if isinstance(weights, torch.Tensor) else weights


checkpoint, iteration, ranks, target = Path(sys.argv[1]), *map(int, sys.argv[2:4]), Path(sys.argv[4])
file = Path(f"iter_{iteration:07d}") / "mp_rank_00" / "model_optim_rng.pt"
states = torch.load(checkpoint / file, weights_only=False)  # a test has written it
states["args"].tensor_model_parallel_size = ranks
for rank in range(ranks):
    folder = target / file.parts[0] / f"mp_rank_{rank:02d}"
    folder.mkdir(parents=True)
    torch.save({**states, "model": cut(states["model"], rank, ranks)}, folder / file.name)
(target / "latest_checkpointed_iteration.txt").write_text(str(iteration))
