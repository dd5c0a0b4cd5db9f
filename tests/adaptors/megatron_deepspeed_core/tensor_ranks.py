"""tensor_ranks.py CHECKPOINT RANKS TARGET: cut a checkpoint of one process for tensor-parallel ranks.

The rows of the fused projection are query, key and value one after the other, in each rank its own. Upstream
draws them for one process and gives each rank a run of rows: another number of ranks has another model.
"""

import sys
from pathlib import Path

import torch

LAST_DIMENSION = ("attention.dense.weight", "dense_4h_to_h.weight")
FIRST_DIMENSION = ("dense_h_to_4h.weight", "dense_h_to_4h.bias", "word_embeddings.weight")
FUSED = ("query_key_value.weight", "query_key_value.bias")


def part(name: str, value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what a rank has of a parameter."""
    if name.endswith(FUSED):
        return torch.cat([third.chunk(ranks)[rank] for third in value.chunk(3)])
    if name.endswith(LAST_DIMENSION):
        return value.chunk(ranks, 1)[rank].contiguous()
    return value.chunk(ranks)[rank].contiguous() if name.endswith(FIRST_DIMENSION) else value


def cut(weights: object, rank: int, ranks: int, name: str = "") -> object:
    """Return a rank's part of nested dictionaries of parameters."""
    if isinstance(weights, dict):
        return {key: cut(value, rank, ranks, f"{name}.{key}") for key, value in weights.items()}
    return part(name, weights, rank, ranks) if isinstance(weights, torch.Tensor) else weights


checkpoint, ranks, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
(file,) = checkpoint.glob("iter_*/mp_rank_00/model_optim_rng.pt")
states = torch.load(file, weights_only=False)  # a test has written it
states["args"].tensor_model_parallel_size = ranks
for rank in range(ranks):
    folder = target / file.parts[-3] / f"mp_rank_{rank:02d}"
    folder.mkdir(parents=True)
    torch.save({**states, "model": cut(states["model"], rank, ranks)}, folder / file.name)
tracker = "latest_checkpointed_iteration.txt"
(target / tracker).write_text((checkpoint / tracker).read_text())
