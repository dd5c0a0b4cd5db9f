"""The groups of rank 1 of 4 processes that are not there (torch's fake backend): TP 2, EP 2, expert-TP 1.

It imports nothing of ours: workers run where ``tests`` is Megatron's package, and import it as a neighbour.
"""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

TP, RANKS = 2, 4


def groups() -> None:
    """Make them, and seed their generators."""
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    quiet = {"create_gloo_process_groups": False} if "create_gloo_process_groups" in known else {}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=TP, expert_model_parallel_size=2, expert_tensor_parallel_size=1, **quiet
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
