"""The losses of multi-token prediction, for the log; megatron-core adds their gradients by itself."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices

PREFIX = "mtp_"  # of the losses' names


def names(args: Namespace) -> list[str]:
    """Return the names of the losses that a run has, as upstream logs them: one for each further token."""
    return [f"{PREFIX}{number}_loss" for number in range(1, (args.mtp_num_layers or 0) + 1)]


def take(args: Namespace, micro_batches: int) -> dict[str, float]:
    """Return each loss, a mean over what happened since the last time; unweighted, in nats a token.

    A collective: all ranks must call it.

    Args:
        micro_batches: of a rank, since the last time.
    """
    from megatron.core import parallel_state

    found = names(args)
    if not found:
        return {}
    own = torch.zeros(len(found), dtype=torch.float32, device=devices.current().torch_device())
    for values in _tracked():
        own += values
        values.zero_()
    dist.all_reduce(own)  # stages before the last have none
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    own *= stages / (dist.get_world_size() * micro_batches)
    return dict(zip(found, own.tolist(), strict=True))


def forget(args: Namespace) -> None:
    """Drop what an earlier run of this process has left, perhaps of another number of layers."""
    if names(args):
        _tracker().clear()


def _tracked() -> list[torch.Tensor]:
    """Return the sums of this process, in no tensor or one; 0.19 has renamed them."""
    tracker = _tracker()
    return [tracker[name] for name in ("values", "loss_values") if name in tracker]


def _tracker() -> dict[str, Any]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return MTPLossLoggingHelper.tracker
