"""``megatron.core.optimizer``: Adam and SGD with the interface that Megatron's checkpoints expect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_core.decorators import constant, fused_optimizer_present, wrap
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
