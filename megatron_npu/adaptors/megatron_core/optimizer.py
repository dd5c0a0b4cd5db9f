"""``megatron.core.optimizer``: Adam and SGD with the interface that Megatron's checkpoints expect.

Also many tensors in one call (``optimizer``, ``clip_grads``), and --optimizer-cpu-offload.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import constant, fused_optimizer_present, replace, wrap
from megatron_npu.errors import UsageError
from megatron_npu.ops import multi_tensor
from megatron_npu.ops.adam import FusedAdam
from megatron_npu.ops.sgd import FusedSGD

_WHY = (
    "without apex and TransformerEngine Megatron falls back to torch's AdamW, with which the distributed "
    "optimizer of 0.16 cannot resume: state_dict() fails before the first step, and load_state_dict() "
    "shares one step tensor between all parameters, which is then counted once per parameter"
)
_optimizer = functools.partial(constant, why=_WHY, condition=fused_optimizer_present)

_optimizer("megatron.core.optimizer:Adam", FusedAdam)
constant(
    "megatron.core.optimizer:SGD",
    FusedSGD,
    why="torch's SGD loops over parameters, and its fused one is wrong with 16 bits on a cpu (torch 2.13)",
    condition=fused_optimizer_present,
)
_optimizer("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", False, versions=">=0.15")
_optimizer("megatron.core.optimizer.distrib_optimizer:Adam", FusedAdam)
_optimizer("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", True)
_optimizer("megatron.core.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER", True, versions=">=0.15")


@wrap(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    why="an fp32 parameter's shard is a view of a leaf that requires grad: copying into it needs no_grad",
)
def without_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run it under ``torch.no_grad``."""
    return torch.no_grad()(original)


constant(
    "megatron.core.optimizer.optimizer:multi_tensor_scale_impl",
    multi_tensor.multi_tensor_scale,
    why="without apex and TransformerEngine upstream loops over the gradients in Python",
    condition=fused_optimizer_present,
)


@replace(
    "megatron.core.optimizer.optimizer:_multi_tensor_copy_this_to_that",
    why="upstream copies tensor by tensor, bf16 always: a launch for each parameter of the model",
)
def copy_all(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy each tensor of ``this`` to its partner in ``that``."""
    multi_tensor.copy_all(this, that, overflow_buf)


_WHY = "without apex and TransformerEngine upstream loops over the gradients in Python"

constant(
    "megatron.core.optimizer.clip_grads:l2_norm_impl",
    multi_tensor.multi_tensor_l2norm,
    why=_WHY,
    condition=fused_optimizer_present,
)
constant(
    "megatron.core.optimizer.clip_grads:multi_tensor_scale_impl",
    multi_tensor.multi_tensor_scale,
    why=_WHY,
    condition=fused_optimizer_present,
)


@wrap(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.__init__",
    devices=("cpu",),
    why="on a cpu nothing is offloaded, and what is not is updated in a copy only: the model never learns, "
    "and nothing fails",
)
def refuse_on_a_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Say so at once."""

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "--optimizer-cpu-offload on the cpu device",
            "a device whose memory is not the host's",
            "Leave the flag away: the optimizer's state is on the cpu already.",
        )

    return initialise
