"""Fix the first step and the loss scale of DeepSpeed 0.19.8 in 16 bits without ZeRO."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.base.replaced import Replaced

_OPTIMIZERS = {"fused_optimizer": "FP16_Optimizer", "unfused_optimizer": "FP16_UnfusedOptimizer"}


def initialize(deepspeed_initialize: Callable[..., Any], /, **given: Any) -> Any:
    """Return what ``deepspeed.initialize`` does, of an engine that begins and scales as with ZeRO.

    DeepSpeed 0.19.8 without ZeRO takes one step with gradients of zero at the start, to have moments: weights
    decay once, and Adam's corrections of its moments' bias begin with the second step, 0.74 of the first's.
    And its engine divides the gradients of fp16 by a scale by which no loss was multiplied (its pull request
    8393): what is left of them is small beside Adam's epsilon.

    Args:
        deepspeed_initialize: DeepSpeed's function.
        given: its arguments.
    """
    replaced = Replaced()
    for module, name in _OPTIMIZERS.items():
        owner = getattr(importlib.import_module(f"deepspeed.runtime.fp16.{module}"), name)
        replaced.set(owner, "initialize_optimizer_states", lambda self: None)
    try:
        engine, *others = deepspeed_initialize(**given)
    finally:
        replaced.undo()
    multiply_the_loss(engine)
    step_from_loaded_weights(engine)
    return engine, *others


def multiply_the_loss(engine: Any) -> None:
    """Let an engine's backward multiply the loss by the scale, where DeepSpeed's own does not.

    Args:
        engine: DeepSpeed's; of another precision than fp16, or with ZeRO, it stays as it is.
    """
    scale = getattr(engine.optimizer, "loss_scale_config", None)  # of no optimizer of ZeRO
    if scale is not None and scale.use_grad_scaling and engine.torch_autocast_z0_gradscaler is None:
        engine.torch_autocast_z0_gradscaler = LossTimesScale(engine.optimizer)


def step_from_loaded_weights(engine: Any) -> None:
    """Let an engine that loads weights, but no optimizer, step from these weights.

    DeepSpeed 0.19.8 copies them to the optimizer's fp32 weights with ``load_module_only`` alone. Otherwise
    the first step goes back to what the model was made with.

    Args:
        engine: DeepSpeed's; of fp32, or with ZeRO, it stays as it is.
    """
    if not hasattr(engine.optimizer, "loss_scale_config"):
        return
    load = engine.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(load).bind(*args, **kwargs)
        given.apply_defaults()
        loaded = load(*args, **kwargs)
        if not given.arguments["load_optimizer_states"]:
            engine.optimizer.refresh_fp32_params()
        return loaded

    engine.load_checkpoint = load_checkpoint


class LossTimesScale:
    """What the engine takes for torch's ``GradScaler``: the optimizer itself divides, skips and adapts."""

    def __init__(self, optimizer: Any) -> None:
        """Take the engine's optimizer, which has a ``loss_scale_config``."""
        self.optimizer = optimizer

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` ``[]`` times the scale, in fp32."""
        return loss.float() * self.optimizer.loss_scale_config.cur_scale

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing: ``step`` divides and clips."""

    def step(self, optimizer: Any) -> None:
        """Step as without this object."""
        optimizer.step()

    def update(self) -> None:
        """Do nothing: ``step`` has adapted the scale."""
