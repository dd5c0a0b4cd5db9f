"""``megatron.core.pipeline_parallel.schedules``: every training step passes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.shared.start import announce_first
from megatron_npu.base.errors import UsageError

around(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    why="called before each step: the place to say once what was patched",
)(announce_first)


@around(
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    why="with two stages a rank is its neighbour's neighbour on both sides, and batched sends carry no tag: "
    "the activations of two chunks are exchanged, the loss is wrong and nothing fails",
    devices=("cpu",),
)
def refuse_batched_p2p(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Reject the combination, against which upstream guards only in ``megatron.training.arguments``.

    Raises:
        UsageError: two stages of several chunks each would send in batches.
    """
    chunks = kwargs["model"]
    config = chunks[0].config
    if len(chunks) > 1 and config.pipeline_model_parallel_size == 2 and config.batch_p2p_comm:
        raise UsageError(
            "interleaved pipeline of 2 stages with batch_p2p_comm=True",
            "overlap_p2p_comm=True and batch_p2p_comm=False, which are correct",
            "Set both in the TransformerConfig (stock scripts: leave overlapped p2p on).",
        )
    return original(*args, **kwargs)


@around(
    "megatron.core.pipeline_parallel.schedules:backward_step",
    versions=">=0.17,<0.19",
    upstream_bug=True,
    why="--hybrid-context-parallel is a TypeError in the first backward: its scheduler hands over the type "
    "of the model, which 0.17 and 0.18 have taken out of the arguments",
    until="0.19, whose scheduler hands over four arguments",
)
def drop_model_type(
    original: Callable[..., Any],
    input_tensor: Any,
    output_tensor: Any,
    output_tensor_grad: Any,
    *model_type_and_config: Any,
    **config: Any,
) -> Any:
    """Drop the model's type from the arguments, which only hybrid_cp_schedule.py still passes."""
    return original(input_tensor, output_tensor, output_tensor_grad, *model_type_and_config[-1:], **config)
