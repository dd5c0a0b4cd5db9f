"""Patch ``megatron.core.pipeline_parallel.schedules`` to average the loss over the tokens of all parts of a
sequence.

The parts are the tokens of all context-parallel ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_npu.adaptors.megatron_core.decorators import own_backport


@own_backport(
    "megatron.core.pipeline_parallel.schedules:forward_step",
    until="not fixed up to 0.19.2, #7452/9",
    why="with context parallelism and without --calculate-per-token-loss, the gradient is the mean over the "
    "ranks' parts of a sequence, regardless of how many tokens of each part count in the loss (with "
    "--eod-mask-loss or padding)",
)
def weigh_parts(
    original: Callable[..., Any], forward_step_func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Weight the loss of each sequence part by its share of the tokens."""
    from megatron.core import parallel_state

    config = inspect.signature(original).bind(forward_step_func, *args, **kwargs).arguments["config"]
    if (
        config.calculate_per_token_loss
        or getattr(config, "hybrid_context_parallel", False)  # whose groups change from sequence to sequence
        or not parallel_state.is_initialized()
        or parallel_state.get_context_parallel_world_size() == 1
    ):
        return original(forward_step_func, *args, **kwargs)

    @functools.wraps(forward_step_func)
    def weighed(*step: Any, **more: Any) -> Any:
        output, loss_func = forward_step_func(*step, **more)
        return output, functools.partial(_weigh, loss_func)

    return original(weighed, *args, **kwargs)


def _weigh(loss_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``loss_func``, and multiply the loss by the weight of this sequence part.

    Upstream divides the loss by the number of tokens in the part.

    If it does not return the number of tokens, its outputs are returned unchanged.
    """
    from megatron.core import parallel_state

    outputs = loss_func(*args, **kwargs)
    if len(outputs) != 3:
        return outputs
    loss, tokens, *rest = outputs
    whole = tokens.detach().clone().float()
    group = parallel_state.get_context_parallel_group()
    dist.all_reduce(whole, group=group)
    share = tokens * group.size() / whole.clamp(min=1)
    return loss * share, tokens.clamp(min=1), *rest  # up to 0.15 it is divided by none, too
