"""Collect, shard and restore the states of a rank's random generators for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_npu import devices


def state() -> dict[str, Any]:
    """Return the states of this rank's random generators under Megatron-LM's names."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    device = devices.current()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": device.host_rng_state(),
        "cuda_rng_state": device.rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def sharded_state() -> Any:
    """Return the generator states with one entry per tensor- and pipeline-parallel rank.

    As in Megatron, data-parallel ranks use the same random numbers for different data, so one copy suffices.
    With expert parallelism, ranks use different random numbers for their experts, and each state is stored.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    own = state()
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        copies = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return ShardedObject("rng_state", [own], (*shape, copies), (*place, copy), replica_id=0)
    return ShardedObject("rng_state", [own], shape, place, replica_id=copy)


def set_state(state: dict[str, Any]) -> None:
    """Restore the generator states that ``state`` has returned.

    The device's generator and Megatron's tracker are restored only if the device type matches. Otherwise
    rank 0 logs that they are not restored.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    device = devices.current()
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    device.set_host_rng_state(state["torch_rng_state"])
    reason = device.why_not_restored(state["cuda_rng_state"])
    if reason is None:
        device.set_rng_state(state["cuda_rng_state"])
        get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
    elif dist.get_rank() == 0:
        print(f" {reason}", flush=True)
