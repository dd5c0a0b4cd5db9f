"""Fix reductions that upstream omits, repeats or starts too early, and a gathered row that is used as one
rank's part.

Patches ``megatron.core.tensor_parallel``, ``distributed``, ``models.common.language_module``, ``ssm`` and
``transformer.multi_token_prediction``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import backport


@backport(
    "megatron.core.tensor_parallel.mappings:_reduce",
    versions="<0.19",
    until="0.19.0, #5338",
    why="the sum over tensor-parallel ranks is lost if the input is not contiguous, because a copy is "
    "reduced",
)
def reduce_contiguous(original: Callable[..., Tensor], input_: Tensor, *group: Any, **named: Any) -> Tensor:
    """Reduce a contiguous copy of the tensor over the ranks, and return the copy.

    The argument ``group`` exists since 0.13.
    """
    return original(input_.contiguous(), *group, **named)


@backport(
    "megatron.core.transformer.multi_token_prediction:all_gather_last_dim_from_tensor_parallel_region",
    versions="<0.13",
    until="0.13",
    why="with --mtp-num-layers and tensor parallelism, the gradient of an additional layer's projection, "
    "and of everything before it, is multiplied by the number of ranks, because each rank has it in "
    "full and they are summed",
)
def gather_what_all_ranks_use_alike(original: Callable[..., Tensor], input_: Tensor) -> Tensor:
    """Gather the ranks' parts ``[s, b, h / ranks]`` into ``[s, b, h]``.

    The backward pass returns this rank's slice of the gradient.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(input_)


@backport(
    "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
    until="not fixed up to 0.19.2, #7452/2",
    why="a model that is given labels and gathers its logits (parallel_output=False, or "
    "runtime_gather_output=True) has a loss that is too large by the logarithm of the tensor-parallel "
    "size, and a wrong gradient, because the whole row is treated as one rank's part of the vocabulary",
    order=1,
)
def compute_loss_of_own_part(
    original: Callable[..., Tensor], self: Any, labels: Tensor, logits: Any
) -> Tensor:
    """Pass only this rank's part of the gathered logits to the loss.

    The other parts have no gradient on this rank.

    Args:
        original: upstream's function.
        self: the model.
        labels: [b, s].
        logits: [s, b, v], or this rank's part [s, b, v / ranks], or the factors of a fused output layer.

    Returns:
        [b, s].
    """
    from megatron.core import parallel_state

    groups = getattr(self, "pg_collection", None) or getattr(self, "model_comm_pgs", None)  # since 0.14
    group = getattr(groups, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1 and isinstance(logits, Tensor) and logits.size(-1) == self.vocab_size:
        logits = logits.chunk(group.size(), dim=-1)[group.rank()].contiguous()
    return original(self, labels, logits)


# --- gated delta nets ----------------------------------------------------------------------------------

_delta = partial(
    backport,
    until="not fixed up to 0.19.2, #7452/11",
    why="the norm before the output of a gated delta net has one weight for the heads of all "
    "tensor-parallel ranks, but without sequence parallelism each rank's gradient covers only its own "
    "heads, so that the copies of the weight drift apart",
)


@_delta("megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__", versions=">=0.16,<0.19")
@_delta("megatron.core.ssm.gated_delta_net.common:_GDNBase.__init__", versions=">=0.19")
def sum_gradient_of_output_norm(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Sum the output norm's gradient over the ranks.

    Upstream does so only with sequence parallelism.
    """
    original(self, *args, **kwargs)
    group = self.pg_collection.tp
    if group.size() == 1 or self.config.sequence_parallel:
        return

    def summed(gradient: Tensor) -> Tensor:
        whole = gradient.clone()
        dist.all_reduce(whole, group=group)
        return whole

    for parameter in self.out_norm.parameters():
        parameter.register_hook(summed)


# --- experts' parameters that no tensor-parallel rank duplicates ---------------------------------------

_norm = partial(
    backport,
    versions="<0.19",
    until="0.19.0, #5916",
    why="with expert and tensor parallelism, the gradient norm omits expert parameters that are not split "
    "(biases of the second linear layer) on all ranks but the first of a tensor-parallel group, "
    "although these ranks hold other experts: gradients are clipped less than requested",
)


@_norm("megatron.core.tensor_parallel.layers:param_is_not_tensor_parallel_duplicate")
def is_no_duplicate(original: Callable[..., bool], param: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return True if a parameter is not a duplicate of a parameter on another rank.

    An expert's parameter is checked with the expert-tensor-parallel rank.
    """
    if getattr(param, "allreduce", True) or getattr(param, "tensor_model_parallel", False):
        return original(param, *args, **kwargs)
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_parallel_rank() == 0


@_norm("megatron.core.tensor_parallel.layers:copy_tensor_model_parallel_attributes")
def copy_whether_of_experts(
    original: Callable[..., None], destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Copy the attribute ``allreduce`` of an expert's parameter to the optimizer's copy of that parameter."""
    original(destination_tensor, source_tensor)
    if hasattr(source_tensor, "allreduce"):
        destination_tensor.allreduce = source_tensor.allreduce  # type: ignore[attr-defined]


# --- several instances of the distributed optimizer ----------------------------------------------------

_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_streams = partial(
    backport,
    devices=("npu", "cuda"),
    versions="<0.17",
    until="0.17.0, #3693",
    why="with --overlap-grad-reduce and several instances of the distributed optimizer, the reduction waits "
    "for the default stream, which need not be the one that computes gradients, so it may read them too "
    "early",
)


@_streams(f"{_GROUP}.start_grad_sync")
def wait_for_gradients(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Make the communication stream also wait for the work on the current stream."""
    config = self.ddp_config
    if config.overlap_grad_reduce and config.num_distributed_optimizer_instances > 1:
        self.communication_stream.wait_stream(torch.cuda.current_stream())
    original(self, *args, **kwargs)


@_streams(f"{_GROUP}.finish_grad_sync")
def wait_for_reduction(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Make the current stream also wait for the work on the communication stream."""
    original(self, *args, **kwargs)
    config = self.ddp_config
    if config.overlap_grad_reduce and config.num_distributed_optimizer_instances > 1:
        torch.cuda.current_stream().wait_stream(self.communication_stream)
