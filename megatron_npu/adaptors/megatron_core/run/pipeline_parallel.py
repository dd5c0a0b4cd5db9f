"""Patch ``megatron.core.pipeline_parallel.schedules``, which every training step uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.shared.start import announce_first
from megatron_npu.base.errors import UsageError

around(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    why="called before each step; hook point for logging once which functions were patched",
)(announce_first)


@around(
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    why="with two stages the neighbor on both sides is the same rank, and batched sends carry no tag: the "
    "activations of two chunks are swapped, and the loss is wrong without any error",
    devices=("cpu",),
)
def refuse_batched_p2p(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Reject a combination of options that upstream checks only in ``megatron.training.arguments``.

    Raises:
        UsageError: two stages of several chunks each would send in batches.
    """
    chunks = kwargs["model"]
    config = chunks[0].config
    if len(chunks) > 1 and config.pipeline_model_parallel_size == 2 and config.batch_p2p_comm:
        raise UsageError(
            "an interleaved pipeline with 2 stages requires overlap_p2p_comm=True and batch_p2p_comm=False, "
            "because batched sends swap the activations of the two chunks. Set both in the "
            "TransformerConfig (stock scripts: leave overlapped p2p on)."
        )
    return original(*args, **kwargs)


@around(
    "megatron.core.pipeline_parallel.schedules:backward_step",
    versions=">=0.17,<0.19",
    upstream_bug=True,
    why="--hybrid-context-parallel raises a TypeError in the first backward: its scheduler passes the model "
    "type, which 0.17 and 0.18 removed from the arguments",
    until="0.19, whose scheduler passes four arguments",
)
def drop_model_type(
    original: Callable[..., Any],
    input_tensor: Any,
    output_tensor: Any,
    output_tensor_grad: Any,
    *model_type_and_config: Any,
    **config: Any,
) -> Any:
    """Remove the argument for the model type, which ``backward_step`` no longer accepts since 0.17.

    Only hybrid_cp_schedule.py still passes it.
    """
    return original(input_tensor, output_tensor, output_tensor_grad, *model_type_and_config[-1:], **config)
