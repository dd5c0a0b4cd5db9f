"""Patch ``megatron.optimizer`` so that Adam and gradient clipping are the same with and without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.deepspeed.flags_and_runs import zero_stage
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import (
    UNTIL,
    backport,
    constant,
    replace,
)
from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED, WITHOUT_CUDA
from megatron_npu.ops.optimizers import multi_tensor
from megatron_npu.ops.optimizers.adam import FusedAdam


def adam(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer for ``--optimizer adam``, which uses decoupled weight decay.

    With ZeRO stage 3, the parameters are updated in parts, with several calls of ``step`` per iteration. Like
    apex's optimizer, ``FusedAdam`` counts steps per group; torch's AdamW would count them per part.

    Args:
        groups: parameter groups, with ``wd_mult`` and ``lr_mult``.
        options: ``lr``, ``betas``, ``eps`` and ``weight_decay``.
    """
    return torch.optim.AdamW(groups, **options) if _in_parts() else FusedAdam(groups, **options)


def _in_parts() -> bool:
    from megatron import get_args

    args = get_args()
    # upstream has read the file by now, and forgotten its name
    return bool(args.deepspeed) and zero_stage(args, args.deepspeed_config_dict) == 3


constant(
    "megatron.optimizer:Adam",
    adam,
    devices=WITHOUT_CUDA,
    why="without CUDA upstream uses torch's Adam, which adds weight decay to the gradient; with CUDA it "
    "uses apex's, which decouples it, so the same flags train differently; and at ZeRO stage 3 apex's "
    "counts one step for each part of the model",
    upstream_bug=True,
    until=UNTIL,
)

replace(
    "megatron.optimizer.optimizer:_multi_tensor_copy_this_to_that",
    why="upstream copies bf16, and without CUDA everything, tensor by tensor, with one launch per parameter"
    + LAUNCHES_COUNTED,
)(multi_tensor.copy_all)


@backport(
    "megatron.optimizer:get_param_groups",
    why="at ZeRO stage 3 a GPT consists of one-dimensional parts: upstream mistakes every weight for a "
    "bias, and --weight-decay applies to none",
)
def group_by_whole_shapes(
    original: Callable[..., list[dict[str, Any]]],
    modules: Any,
    no_weight_decay_cond: Callable[[str, Tensor], bool] | None,
    *args: Any,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Exempt biases and parameters that are one-dimensional when unsharded from weight decay by default."""
    return original(modules, no_weight_decay_cond or does_without_decay, *args, **kwargs)


def does_without_decay(name: str, parameter: Tensor) -> bool:
    """Return True if weight decay is not applied to a parameter.

    The rule uses the unsharded shape, which DeepSpeed stores as ``ds_shape``.
    """
    return name.endswith(".bias") or len(getattr(parameter, "ds_shape", parameter.shape)) == 1


@replace(
    "megatron.optimizer.clip_grads:clip_grad_norm_fp32",
    devices=WITHOUT_CUDA,
    why=(
        "without CUDA upstream calls .to() on a Python float and compares with a name that is not a "
        "tensor type"
    ),
    upstream_bug=True,
    until=UNTIL,
)
def clip_grad_norm_fp32(
    parameters: Tensor | Iterable[Tensor],
    grads_for_norm: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2,
    model_parallel_group: Any = None,
) -> float:
    """Scale the fp32 gradients so that their norm is at most ``max_norm``.

    Return the norm before scaling.

    Args:
        parameters: the parameters whose gradients are scaled.
        grads_for_norm: the gradients that this process adds to the norm.
        max_norm: the largest norm that is left unscaled.
        norm_type: order of the norm; may be inf.
        model_parallel_group: the processes over which the norm is computed.
    """
    order = float(norm_type)
    given = _listed(parameters)
    counted = _listed(grads_for_norm)
    if order == 2:
        none = given[0].new_zeros(1, dtype=torch.int32)
        total = multi_tensor.multi_tensor_l2norm(0, none, [counted])[0]
    else:
        norms = torch._foreach_norm(counted, order) if counted else [given[0].new_zeros(())]
        total = torch.linalg.vector_norm(torch.stack(norms), order).reshape(1)
    if order == torch.inf:
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, model_parallel_group)
    else:
        total = total**order
        torch.distributed.all_reduce(total, group=model_parallel_group)
        total = total ** (1 / order)
    norm = float(total)
    factor = max_norm / (norm + 1e-6)
    grads = [parameter.grad for parameter in given if parameter.grad is not None]
    if factor < 1 and grads:
        torch._foreach_mul_(grads, factor)
    return norm


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
