"""Fix the first step and the loss scale of DeepSpeed 0.19.8 in 16-bit training without ZeRO."""

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
    """Call ``deepspeed.initialize``, and make the first step and the loss scaling work as with ZeRO.

    Without ZeRO, DeepSpeed 0.19.8 takes one step with zero gradients at the start to create the moments. As a
    result, the weights decay once, and Adam's bias correction starts at step 2, which shrinks the first
    update by a factor of 0.74. The engine also divides fp16 gradients by a scale by which no loss was
    multiplied (DeepSpeed's pull request 8393), and the resulting gradients are small compared with Adam's
    epsilon.

    Args:
        deepspeed_initialize: DeepSpeed's function.
        given: the arguments of that function.

    Returns:
        The return value of ``deepspeed.initialize``.
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
    """Make the engine's backward pass multiply the loss by the loss scale, if DeepSpeed itself does not.

    Args:
        engine: DeepSpeed's engine; it is left unchanged if it does not train in fp16 or if it uses ZeRO.
    """
    scale = getattr(engine.optimizer, "loss_scale_config", None)  # of no optimizer of ZeRO
    if scale is not None and scale.use_grad_scaling and engine.torch_autocast_z0_gradscaler is None:
        engine.torch_autocast_z0_gradscaler = LossTimesScale(engine.optimizer)


def step_from_loaded_weights(engine: Any) -> None:
    """Make the engine continue from the loaded weights if they were loaded without an optimizer state.

    DeepSpeed 0.19.8 copies the loaded weights to the optimizer's fp32 weights only with ``load_module_only``.
    Otherwise, the first step reverts to the weights with which the model was built.

    Args:
        engine: DeepSpeed's engine; it is left unchanged if it trains in fp32 or uses ZeRO.
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
    """Replacement for torch's ``GradScaler`` that only multiplies the loss.

    The optimizer does the rest.
    """

    def __init__(self, optimizer: Any) -> None:
        """Store the engine's optimizer, whose ``loss_scale_config`` contains the loss scale."""
        self.optimizer = optimizer

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scalar ``loss`` multiplied by the loss scale, in fp32."""
        return loss.float() * self.optimizer.loss_scale_config.cur_scale

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing, because the optimizer's ``step`` unscales and clips the gradients."""

    def step(self, optimizer: Any) -> None:
        """Call the optimizer's ``step`` method, which unscales and clips the gradients."""
        optimizer.step()

    def update(self) -> None:
        """Do nothing, because the optimizer's ``step`` has already updated the loss scale."""
