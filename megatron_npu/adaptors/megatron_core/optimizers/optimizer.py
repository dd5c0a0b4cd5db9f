"""Patch ``megatron.core.optimizer`` to use our Adam and SGD, which can load and save its checkpoints.

Also patches multi-tensor calls (``optimizer.optimizer``, ``optimizer.clip_grads``) and
--optimizer-cpu-offload (``optimizer.cpu_offloading``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import (
    NOT_FIXED,
    around,
    constant,
    fused_optimizer_present,
    replace,
)
from megatron_npu.adaptors.shared import optimizer
from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.ops import dispatch
from megatron_npu.ops.optimizers import multi_tensor
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.ops.optimizers.sgd import FusedSGD

_OPTIMIZER = "megatron.core.optimizer"
_without_apex = functools.partial(constant, condition=fused_optimizer_present)

# --- the optimizers ---------------------------------------------------------------------------------

_adam = functools.partial(
    _without_apex,
    why="without apex and TransformerEngine Megatron falls back to torch's AdamW, with which the distributed "
    "optimizer of 0.16 cannot resume: state_dict() fails before the first step, and load_state_dict() "
    "shares one step tensor between all parameters, which is then counted once per parameter",
)
_adam(f"{_OPTIMIZER}:Adam", FusedAdam)
_adam(f"{_OPTIMIZER}:USING_PYTORCH_OPTIMIZER", False, versions=">=0.15")
_adam(f"{_OPTIMIZER}.distrib_optimizer:Adam", FusedAdam)
_adam(f"{_OPTIMIZER}.distrib_optimizer:HAVE_APEX_OR_TE", True)
_adam(f"{_OPTIMIZER}.distrib_optimizer:USING_APEX_OPTIMIZER", True, versions=">=0.15")
_without_apex(
    f"{_OPTIMIZER}:SGD",
    FusedSGD,
    why="torch's SGD loops over parameters, and its fused version is wrong with 16 bits on a cpu (torch "
    "2.13)",
)


@around(
    f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "an fp32 parameter's shard is a view of a leaf that requires grad, so copying into it needs "
        "no_grad; in the precision-aware optimizer, upstream mistakes the padding mark (since 0.14) for a"
        " state"
    ),
)
def set_main_param_without_grad(
    original: Callable[..., None], self: Any, model_param: Tensor, tensors: dict[str, Tensor]
) -> None:
    """Run upstream's method without gradients, and only on tensors."""
    with torch.no_grad():
        original(self, model_param, {name: t for name, t in tensors.items() if torch.is_tensor(t)})


@around(
    f"{_OPTIMIZER}.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.__init__",
    devices=("cpu",),
    why="on a cpu the host copy of an offloaded parameter counts as the device's: only that copy is "
    "updated, without a gradient, and the model never learns. There is nothing to offload",
)
def offload_nothing_on_a_cpu(
    original: Callable[..., None],
    self: Any,
    params: Any,
    offload_fraction: float = 0.5,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Disable optimizer offloading on a CPU, where all weights are already in host memory."""
    if offload_fraction:
        dispatch.report_fallback(
            "optimizer-cpu-offload", "everything is already in host memory", "moves nothing"
        )
    original(self, params, 0.0, *args, **kwargs)


_saving = functools.partial(
    around,
    upstream_bug=True,
    until=NOT_FIXED,
    why="a checkpoint of a run whose updates were all skipped, as the first ones in fp16 often are, has no "
    "optimizer states and cannot be loaded (KeyError)",
)


@_saving(f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.sharded_state_dict")
@_saving(f"{_OPTIMIZER}.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict")
def with_states(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Create missing optimizer states before calling upstream's function."""
    if not self.optimizer.state and self.init_state_fn is not None:  # an offloaded one makes them itself
        self.init_state_fn(self.optimizer, self.config)
    return original(self, *args, **kwargs)


# --- many tensors in one call -----------------------------------------------------------------------

_multi_tensor = functools.partial(
    _without_apex, why="without apex and TransformerEngine upstream loops over the gradients in Python"
)
_multi_tensor(f"{_OPTIMIZER}.optimizer:multi_tensor_scale_impl", multi_tensor.multi_tensor_scale)
_multi_tensor(f"{_OPTIMIZER}.clip_grads:multi_tensor_scale_impl", multi_tensor.multi_tensor_scale)
_multi_tensor(f"{_OPTIMIZER}.clip_grads:l2_norm_impl", multi_tensor.multi_tensor_l2norm)

replace(
    f"{_OPTIMIZER}.optimizer:_multi_tensor_copy_this_to_that",
    why="upstream copies tensor by tensor, always for bf16, with one launch per parameter" + LAUNCHES_COUNTED,
)(multi_tensor.copy_all)

# Without TransformerEngine nothing in these loops is fp8.
_together = functools.partial(around, condition=fused_optimizer_present, why=optimizer.WHY)
for _target in (
    "distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
    "distrib_optimizer:DistributedOptimizer._copy_model_grads_to_main_grads",
    "optimizer:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads",
):
    _together(f"{_OPTIMIZER}.{_target}")(optimizer.copy_together)
