"""stages.py CHECKPOINT STAGES: let a checkpoint of DeepSpeed's engine be one of a pipeline.

Its weights are in a file per layer. So two layouts can begin with the same weights; otherwise each stage
draws its own.
"""

import sys
from pathlib import Path

import torch

checkpoint, stages = Path(sys.argv[1]), int(sys.argv[2])
(folder,) = (path for path in checkpoint.iterdir() if path.is_dir())
states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)  # a test has written it
states["args"].pipeline_model_parallel_size = states["mp_world_size"] = stages
for rank in range(stages):
    torch.save(states, folder / f"mp_rank_{rank:02d}_model_states.pt")
