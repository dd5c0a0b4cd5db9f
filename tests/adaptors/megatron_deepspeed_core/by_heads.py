"""by_heads.py CHECKPOINT ITERATION TARGET: let a checkpoint of one process be one of Megatron-LM 285068c8.

The rows of the fused projection are queries, keys and values one after the other, there head after head.
"""

import sys
from pathlib import Path

import torch

KEY_VALUE, HEADS = ("query_key_value.weight", "query_key_value.bias"), 4


def by_heads(weights: object, name: str = "") -> object:
    """Return nested dictionaries of parameters with the rows in the other order."""
    if isinstance(weights, dict):
        return {key: by_heads(value, f"{name}.{key}") for key, value in weights.items()}
    if not isinstance(weights, torch.Tensor) or not name.endswith(KEY_VALUE):
        return weights
    return weights.view(3, HEADS, -1, *weights.shape[1:]).transpose(0, 1).reshape(weights.shape)


checkpoint, iteration, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
file = Path(f"iter_{iteration:07d}") / "mp_rank_00" / "model_optim_rng.pt"
states = torch.load(checkpoint / file, weights_only=False)  # a test has written it
(target / file).parent.mkdir(parents=True)
# the arguments name classes that are not there
kept = {"model": by_heads(states["model"]), "checkpoint_version": 3.0, "iteration": iteration}
torch.save(kept, target / file)
(target / "latest_checkpointed_iteration.txt").write_text(str(iteration))
