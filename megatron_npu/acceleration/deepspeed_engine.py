"""A model that DeepSpeed's engine trains, behind the same interface as what torch trains.

The engine averages gradients, clips them, steps, scales the loss and saves, as its configuration says. This
project gives it the model, an optimizer and a schedule where the file has none, and reads its files without
running what is in them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import os
import pickle
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_npu import deepspeed_device, deepspeed_half, devices, safe_load
from megatron_npu.acceleration import deepspeed_config
from megatron_npu.acceleration.gradients import norm_of
from megatron_npu.acceleration.optimizer_state import rebind
from megatron_npu.acceleration.precision import LossScale, dtype_of
from megatron_npu.acceleration.prepare import OptimizerFn, Prepared, accelerated, decayed_and_not
from megatron_npu.errors import UsageError
from megatron_npu.switches import Switches

FOLDER, TAG = "deepspeed", "engine"  # in a checkpoint
_LONGEST = 300  # characters of what DeepSpeed says: pydantic's reasons are pages


def load(log_level: str = "info") -> Any:
    """Import DeepSpeed for this process's device; return its module."""
    deepspeed_device.choose(devices.current().name)
    deepspeed = importlib.import_module("deepspeed")
    deepspeed_device.compile_nothing()
    # DeepSpeed 0.19 calls torch 2.13's collectives by names that are to go
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.INFO if log_level == "debug" else logging.ERROR)
    return deepspeed


@dataclass
class DeepSpeedPrepared(Prepared):
    """What ``prepare`` made of a model.

    Attributes:
        engine: DeepSpeed's; ``model`` is the same.
        stage: of ZeRO.
    """

    engine: Any = None
    stage: int = 0

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return what belongs around one micro batch; the engine exchanges gradients as its stage wants."""
        self.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return nothing: weights and inputs have the engine's precision."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, which is divided by the number of micro-batches already."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> float | None:
        """Let the engine clip, step and forget the gradients; see ``Prepared.step``."""
        norm = None
        if not hasattr(self.engine.optimizer, "_global_grad_norm"):  # stage 0 in fp32: torch's optimizer
            norm = norm_of([p.grad for p in self.module.parameters() if p.grad is not None], self.device)
        self.engine.step()
        if self.loss_scale is not None:
            self.loss_scale.value = float(self.engine.optimizer.loss_scale)
        if not self.engine.was_step_applied():
            return None if self.loss_scale is not None else math.inf
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine writes files of its own (``save_beside``)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, as ``state_dict``."""

    def description(self) -> dict[str, Any]:
        """Return what a run that goes on must have in common."""
        return {
            "deepspeed": {
                "zero_optimization.stage": self.stage,
                "precision": self.switches.mixed_precision or "fp32",
                "ranks": self.engine.dp_world_size,
            }
        }

    def save_beside(self, place: Path) -> None:
        """Write the engine's checkpoint into a folder."""
        self.engine.save_checkpoint(str(place / FOLDER), tag=TAG)

    def load_beside(self, place: Path) -> None:
        """Read it."""
        self.engine.checkpoint_engine.load = _read  # its own runs what a file says,
        with safe_load.weights_only():  # and so do further readers, of universal checkpoints for one
            self.engine.load_checkpoint(str(place / FOLDER), tag=TAG)

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights and buffers, whole, in fp32 where there are main weights, and on the host."""
        from deepspeed.utils import safe_get_full_fp32_param

        found: dict[str, Tensor] = {}
        whole: dict[int, Tensor] = {}  # of a weight that has two names once
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, nn.Parameter):
                found[name] = tensor.cpu()
                continue
            if id(tensor) not in whole:
                main = safe_get_full_fp32_param(tensor) if self.stage else None
                whole[id(tensor)] = (self._gathered(tensor) if main is None else main).detach().cpu()
            found[name] = whole[id(tensor)]
        return found

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of a weight without a main weight (frozen, or of stage 0), whole."""
        from deepspeed import zero

        with zero.GatheredParameters([parameter], enabled=self.stage == 3):
            return parameter.detach().clone()


def prepare(
    model: nn.Module,
    optimizer_fn: OptimizerFn | torch.optim.Optimizer | None,
    lr_scheduler_fn: Any,
    config: Any,
    switches: Switches,
    args: Namespace,
    *,
    device: torch.device,
) -> DeepSpeedPrepared:
    """Return the model in DeepSpeed's engine.

    Args:
        model: changed in place.
        optimizer_fn: where the file has no optimizer, as ``prepare.prepare`` takes it.
        lr_scheduler_fn: called with the optimizer, where the file has no scheduler; None: there is none.
        config: of ``deepspeed_config.filled``.
        switches: what goes together with DeepSpeed (``refusals``).
        args: the flags.
        device: of this rank.

    Raises:
        UsageError: what DeepSpeed says of its configuration, in one line; or an optimizer of the file's and
            of the template's.
    """
    deepspeed = load(args.log_level)
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))  # of a process that nobody has launched
    before = dict(model.named_parameters())
    module, ledger = accelerated(model, switches)
    values = deepspeed_config.finished(config, args, module)
    precision = deepspeed_config.precision_of(values, None)
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if "optimizer" not in values:  # DeepSpeed knows by name those that it has tried, and compiles its own
        values.setdefault("zero_allow_untested_optimizer", True)
        values.setdefault("zero_force_ds_cpu_optimizer", False)
    elif optimizer_fn is not None:
        raise UsageError(
            f"--deepspeed-config {args.deepspeed_config}: optimizer, and one of the template's",
            "one of them",
            "Return None in its place, or leave it out of the file.",
        )
    try:
        engine, *_ = deepspeed_half.initialize(
            deepspeed.initialize,
            model=module,
            optimizer=None if "optimizer" in values else _optimizer(optimizer_fn, before, trained, args),
            model_parameters=_groups(optimizer_fn, trained, args),
            lr_scheduler=None if "scheduler" in values else lr_scheduler_fn,
            config=values,
            dist_init_required=False,
        )
    except (ValueError, TypeError, AssertionError, NotImplementedError, RuntimeError) as error:
        raise _told(args, error) from error
    if precision:
        module.register_forward_pre_hook(_inputs_in(dtype_of(precision)), with_kwargs=True)
    stage = deepspeed_config.stage_of(values)
    ledger.append(_line(deepspeed.__version__, engine, stage, precision))
    return DeepSpeedPrepared(
        model=engine,
        module=module,
        optimizer=engine.optimizer,
        lr_scheduler=engine.lr_scheduler,
        switches=replace(switches, mixed_precision=precision),
        device=device,
        weights=trained,
        clip_grad=args.clip_grad,
        loss_scale=LossScale(float(engine.optimizer.loss_scale)) if precision == "fp16" else None,
        ledger=ledger,
        engine=engine,
        stage=stage,
    )


def _groups(optimizer_fn: Any, trained: dict[str, nn.Parameter], args: Namespace) -> list[Any]:
    """Return what an optimizer is made of: this project's groups, or for a user's function the weights."""
    every = list(trained.values())
    return every if optimizer_fn is not None else decayed_and_not(every, args.weight_decay)


def _optimizer(
    optimizer_fn: OptimizerFn | torch.optim.Optimizer | None,
    before: dict[str, nn.Parameter],
    trained: dict[str, nn.Parameter],
    args: Namespace,
) -> Any:
    """Return an optimizer, or what makes one of the groups."""
    if isinstance(optimizer_fn, torch.optim.Optimizer):
        rebind(optimizer_fn, before, trained)
    if optimizer_fn is not None:
        return optimizer_fn
    betas = (args.adam_beta1, args.adam_beta2)
    # torch's counts the steps of each weight: ZeRO 3 steps a group part by part, several times an iteration
    return functools.partial(torch.optim.AdamW, lr=args.lr, betas=betas, eps=args.adam_eps)


def _inputs_in(dtype: torch.dtype) -> Callable[..., Any]:
    """Return a hook that brings a model's floating-point inputs to its weights' dtype, as Trainer does."""

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    return hook


def _line(version: str, engine: Any, stage: int, precision: str | None) -> str:
    what = f"ZeRO {stage} over {engine.dp_world_size} rank{'s' * (engine.dp_world_size > 1)}"
    basic = type(engine.basic_optimizer).__name__
    return f"DeepSpeed {version}: {what}, {precision or 'fp32'}, {basic}"


def _told(args: Namespace, error: Exception) -> UsageError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UsageError(
        f"--deepspeed-config {args.deepspeed_config}: DeepSpeed says: {reason[:_LONGEST]}",
        "what it takes",
        "Correct the file; --log-level debug prints the whole way.",
    )


def _read(path: str, map_location: Any = None) -> Any:
    """Return what DeepSpeed has saved; nothing in it is executed.

    Raises:
        UsageError: it names something that DeepSpeed does not save.
    """
    try:
        with safe_load.allowing(*deepspeed_device.harmless(), alone=True):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = safe_load.refused_name(error)
        raise UsageError(
            f"{path}: {reason}", "what DeepSpeed saves", "Do not load it if you do not trust it."
        ) from error
