"""Choose the parallel layout of a loaded model from the number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags.checks import divides

# Flags of a run's layout and of its training, for one process that does not train.
ALONE: dict[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "cp_comm_type": "p2p",
    "tp_comm_overlap": False,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "world_size": 1,
    "rank": 0,
    "local_rank": 0,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "fine_grained_activation_offloading": False,
    "offload_modules": [],
}


def copies(trained: Mapping[str, Any]) -> dict[str, object]:
    """Return the flags of a layout in which each process has the whole model."""
    return ALONE | {
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "rank": int(os.environ.get("RANK", "0")),
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
    }


def of_all_processes(
    trained: Mapping[str, Any], tensor: int | None = None, pipeline: int | None = None
) -> dict[str, object]:
    """Return the flags of a layout in which all processes share one model.

    Args:
        trained: the flags of the training run.
        tensor, pipeline: the parallel sizes. A size that is None is determined by the other one; if both are
            None, the sizes are those of the training run.

    Raises:
        UsageError: the product of the sizes is not the number of processes, or the model cannot be
            partitioned with these sizes.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if tensor is None and pipeline is None:
        tensor, pipeline = trained["tensor_model_parallel_size"], trained["pipeline_model_parallel_size"]
        if tensor * pipeline != world:
            tensor, pipeline = world, 1
    tensor = tensor or max(world // (pipeline or 1), 1)
    pipeline = pipeline or max(world // tensor, 1)
    if tensor * pipeline != world:
        raise UsageError(
            f"--tensor-model-parallel-size {tensor} and --pipeline-model-parallel-size {pipeline} require "
            f"{tensor * pipeline} processes, but there {('are' if world > 1 else 'is')} {world}",
            remedy=f"Start torchrun with --nproc-per-node {tensor * pipeline}, or change the sizes.",
        )
    layout = copies(trained) | {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_tensor_parallel_size": tensor,
    }
    _check({**trained, **layout})
    return layout


def _check(flags: Mapping[str, Any]) -> None:
    tensor = flags["tensor_model_parallel_size"]
    sizes = ["num_attention_heads", "num_query_groups", "ffn_hidden_size"]
    sizes += ["moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
    for flag in sizes:
        size = flags[flag]
        if size is not None:
            divides(tensor, "--tensor-model-parallel-size", size, f"the model's {flag}")
    divides(
        flags["pipeline_model_parallel_size"],
        "--pipeline-model-parallel-size",
        flags["num_layers"],
        "the model's num_layers",
    )
