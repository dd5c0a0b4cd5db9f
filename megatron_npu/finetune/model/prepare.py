"""Prepare a model, an optimizer and a schedule according to the switches, and run training steps."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.model.activations import checkpoint_activations
from megatron_npu.finetune.model.caches import leave_caches_to_generation
from megatron_npu.finetune.model.compiled_blocks import attention_outside, compile_blocks
from megatron_npu.finetune.model.gradients import clip, norm_of, scale
from megatron_npu.finetune.model.lora import adapt
from megatron_npu.finetune.model.main_weights import MainWeights
from megatron_npu.finetune.model.optimizer_settings import Settings, follow
from megatron_npu.finetune.model.optimizer_state import load_optimizer_state, optimizer_state, rebind
from megatron_npu.finetune.model.precision import LossScale, autocast
from megatron_npu.finetune.model.sharding import accumulating, data_parallel, mesh_of, shard_fully
from megatron_npu.ops import swap
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.options.switches import FULLY, Switches

OptimizerFn = Callable[[Iterable[Any]], torch.optim.Optimizer]
FUSED_OPS = "fused ops: "  # how a line of the ledger begins that says where an operation is
SchedulerFn = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass
class Prepared:
    """A prepared model for training: call ``model``, then ``backward`` and ``step``.

    A training step looks as follows::

        for number, batch in enumerate(micro_batches, 1):
            with prepared.accumulating(last=number == len(micro_batches)):
                with prepared.forward_context():
                    loss = prepared.model(**batch).loss / len(micro_batches)
                prepared.backward(loss)
        norm = prepared.step()

    If no loss scale is used and gradients are not clipped, a custom loop can instead call
    ``loss.backward()``, ``optimizer.step()`` and ``optimizer.zero_grad()``.

    Attributes:
        model: called like the user's own model, with the same attributes.
        module: the user's module inside it, with its original weight names; exports save it.
        optimizer: the optimizer that updates ``weights``.
        lr_scheduler: the schedule, or None.
        switches: the switches as given.
        device: the device of this rank.
        weights: the tensors that the optimizer updates, under their names in ``module``: its parameters,
            their shards, or copies on the host.
        main_weights: the object that synchronizes ``weights`` with the module's parameters, or None if they
            are the same.
        clip_grad: maximum gradient norm; 0 disables clipping.
        loss_scale: the loss scale of fp16.
        ledger: one line per switch that describes its effect.
        own_optimizer: whether the default optimizer is used, whose settings are arguments of ``prepare``.
        flags_schedule: whether the schedule comes from the flags rather than from the script.
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LRScheduler | None
    switches: Switches
    device: torch.device
    weights: dict[str, nn.Parameter]
    main_weights: MainWeights | None = None
    clip_grad: float = 0.0
    loss_scale: LossScale | None = None
    ledger: list[str] = field(default_factory=list)
    own_optimizer: bool = False
    flags_schedule: bool = False

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the forward and backward passes of a micro-batch.

        Args:
            last: whether this is the last micro-batch before ``step``. Only in this micro-batch do the ranks
                reduce gradients, if the sharding permits the delay.
        """
        return accumulating(self.model, last, keep_gathered=self.switches.sharding == "zero-2")

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which each forward pass runs, in training and in evaluation."""
        return autocast(self.device, self.switches.mixed_precision)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss``, a scalar in fp32 or a 16-bit dtype, and accumulate the
        gradients.
        """
        (loss if self.loss_scale is None else self.loss_scale.scaled(loss)).backward()

    def step(self) -> float | None:
        """Clip the gradients, update the weights and the learning rate, and reset the gradients.

        Returns:
            The gradient norm before clipping, or None after an fp16 overflow, which only changes the loss
            scale.
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = norm_of(gradients, self.device)
        factor = 1.0
        if self.loss_scale is not None:
            norm, factor = norm / self.loss_scale.value, 1 / self.loss_scale.value
            if self.loss_scale.update(norm):
                self._forget_gradients()
                return None
        scale(gradients, factor * clip(norm, self.clip_grad))
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._forget_gradients()
        return norm

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.module.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of model, optimizer, schedule and loss scale for
        ``torch.distributed.checkpoint``.

        Each rank stores its own shards, and weights are stored under their names in ``module``, so that a run
        can resume with different sharding or a different number of ranks.
        """
        with self._main_weights_alone():
            state = {
                "model": get_model_state_dict(self.model),
                "optimizer": optimizer_state(self.optimizer, self.weights),
            }
        if self.lr_scheduler is not None:
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load values from a checkpoint in the form that ``state_dict`` returns.

        For the default optimizer, only the moments are loaded; the settings and the learning rate come from
        the current flags. A user's optimizer keeps its stored settings, and a schedule from the flags uses
        these settings.
        """
        settings = Settings.of(self.optimizer, self.lr_scheduler) if self.own_optimizer else None
        set_model_state_dict(self.model, state["model"])
        load_optimizer_state(self.optimizer, self.weights, state["optimizer"])
        if self.main_weights is not None:
            self.main_weights.take()
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if settings is not None:
            settings.restore(self.optimizer, self.lr_scheduler)
        elif self.flags_schedule and isinstance(self.lr_scheduler, LambdaLR):
            follow(self.lr_scheduler)
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights and buffers in host memory on rank 0. All ranks must call this method."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast("dict[str, Tensor]", get_model_state_dict(self.model, options=options))

    def _main_weights_alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.main_weights is None else self.main_weights.alone()


@dataclass(frozen=True)
class AdamOptions:
    """Options of this project's AdamW, the default optimizer."""

    lr: float = 1e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


_DEFAULT_ADAM = AdamOptions()


def prepare(
    model: nn.Module,
    optimizer_fn: OptimizerFn | torch.optim.Optimizer | None,
    lr_scheduler_fn: SchedulerFn | LRScheduler | None,
    switches: Switches,
    *,
    device: torch.device,
    adam: AdamOptions = _DEFAULT_ADAM,
    clip_grad: float = 0.0,
) -> Prepared:
    """Prepare a model, its optimizer and its schedule according to the switches.

    Args:
        model: changed in place. Create large models on the host; they are moved to the device block by block.
        optimizer_fn: a function that is called with the trained parameters, or an optimizer for the model's
            parameters. If None, this project's AdamW is used, without weight decay for vectors (biases and
            norms).
        lr_scheduler_fn: a function that is called with the optimizer, or a schedule for the optimizer. The
            schedule steps once per ``Prepared.step``.
        switches: a combination accepted by ``switch_rules.refuse``.
        device: the device of this rank. With several ranks, a process group must exist.
        adam: options for the default optimizer.
        clip_grad: maximum gradient norm; 0 disables clipping.
    """
    before = dict(model.named_parameters())
    model, ledger = accelerated(model, switches)
    wrapped, module, line = _distribute(model, switches, device)
    ledger.append(line)
    if switches.mixed_precision:
        ledger.append(f"mixed precision: matmuls run in {switches.mixed_precision} with main weights in fp32")
    weights = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not weights:
        raise UsageError(
            "the model has no weights to train: at least one parameter must require a gradient. Use another "
            "model."
        )
    main_weights, line = _main_weights(weights, switches, device)
    if main_weights is not None:
        ledger.append(line)
        weights = main_weights.named
    own_optimizer = optimizer_fn is None
    if optimizer_fn is None:
        optimizer_fn = functools.partial(_adam, options=adam)
    optimizer = optimizer_of(optimizer_fn, before, weights)
    if main_weights is not None:
        main_weights.follow(optimizer)
    if isinstance(lr_scheduler_fn, LRScheduler) or lr_scheduler_fn is None:
        lr_scheduler = lr_scheduler_fn
    else:
        lr_scheduler = _made(lr_scheduler_fn, optimizer, "scheduler", has="step")
    return Prepared(
        model=wrapped,
        module=module,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        switches=switches,
        device=device,
        weights=weights,
        main_weights=main_weights,
        clip_grad=clip_grad,
        loss_scale=LossScale() if switches.mixed_precision == "fp16" else None,
        ledger=ledger,
        own_optimizer=own_optimizer,
    )


def accelerated(model: nn.Module, switches: Switches) -> tuple[nn.Module, list[str]]:
    """Apply those switches that change the model in place.

    Return the model and one log line per switch.
    """
    ledger: list[str] = []
    if switches.lora_rank:
        model, line = adapt(model, switches.lora_rank)
        ledger.append(line)
    leave_caches_to_generation(model)
    if switches.fused_ops:
        ledger.extend(FUSED_OPS + line for line in swap(model).lines())
    if switches.checkpoint_activations:
        ledger.append(checkpoint_activations(model))
    if switches.graph_optimization:
        ledger.append(compile_blocks(model, dynamic=switches.dynamic_shape))
        ledger += filter(None, [attention_outside(model)] if switches.fused_ops else [])
    return model, ledger


def optimizer_of(
    given: OptimizerFn | torch.optim.Optimizer,
    before: dict[str, nn.Parameter],
    weights: dict[str, nn.Parameter],
) -> torch.optim.Optimizer:
    """Return the optimizer for the weights that are trained.

    An existing optimizer is rebound to these weights.

    Args:
        given: the optimizer, or a function that creates it.
        before: the parameters by name at the time when the optimizer was created.
        weights: the tensors to update.

    Raises:
        UsageError: the optimizer has other parameters, or the function returned nothing.
    """
    if isinstance(given, torch.optim.Optimizer):
        known = {id(parameter) for parameter in before.values()}
        if not any(id(parameter) in known for group in given.param_groups for parameter in group["params"]):
            raise UsageError(
                f"the returned optimizer ({type(given).__name__}) was created for another model's "
                "parameters. Return an optimizer for the trained model's parameters, or a function that "
                "creates one from parameters, such as functools.partial(torch.optim.AdamW, lr=...)."
            )
        rebind(given, before, weights)
        return given
    return _made(given, list(weights.values()), "optimizer", has="param_groups")


def _made(function: Any, of: Any, what: str, *, has: str) -> Any:
    """Call a user's function, and return the optimizer or scheduler that it creates.

    Raises:
        UsageError: the given object is not a function of one argument, or the function does not return an
            optimizer or scheduler.
    """
    if not callable(function):
        raise UsageError(
            f"the {what} must be returned as a function that creates it, or as None, but got a "
            f"{type(function).__name__}. Return such a function."
        )
    _require_argument(function, what)
    made = function(of)
    if not hasattr(made, has):
        raise UsageError(
            f"the function that creates the {what} must return the {what}, but it returned "
            f"{'nothing' if made is None else type(made).__name__}. Return the created object from the "
            "function."
        )
    return made


def _require_argument(function: Callable[..., Any], what: str) -> None:
    """Reject a function that cannot be called with a single argument (the parameters or the optimizer)."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        takes = "parameters" if what == "optimizer" else "optimizer"
        raise UsageError(
            f"the function that creates the {what} must accept one argument, the {takes}, but calling it "
            f"failed: {error}. Correct its parameters."
        ) from None
    except ValueError:  # of C, whose signature nobody can say
        return


def _adam(parameters: Iterable[nn.Parameter], *, options: AdamOptions) -> torch.optim.Optimizer:
    groups = decayed_and_not(list(parameters), options.weight_decay)
    return FusedAdam(groups, lr=options.lr, betas=options.betas, eps=options.eps)


def _distribute(
    model: nn.Module, switches: Switches, device: torch.device
) -> tuple[nn.Module, nn.Module, str]:
    """Move the model to the device, and shard it.

    Returns:
        The model to call, the user's module inside it, and a log line.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if switches.sharding in FULLY and ranks > 1:
        line = shard_fully(model, switches, device)
        return model, model, line
    module = model.to(device)
    if ranks > 1:
        return data_parallel(module), module, f"data parallel: {ranks} ranks exchange gradients"
    nothing = f"; {switches.sharding} has nothing to shard" if switches.sharding != "none" else ""
    return module, module, f"one rank{nothing}"


def _main_weights(
    weights: dict[str, nn.Parameter], switches: Switches, device: torch.device
) -> tuple[MainWeights | None, str]:
    """Return the main weights and a log line, or None if the optimizer updates the parameters directly."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if switches.sharding in FULLY and ranks > 1:  # fully_shard has seen to it
        return None, ""
    shared = switches.sharding == "zero-1" and ranks > 1
    if not shared and not switches.cpu_offload:
        return None, ""
    what = f"optimizer states are sharded over {ranks} ranks" if shared else "optimizer states"
    where = "are kept in host memory, where the optimizer runs" if switches.cpu_offload else ""
    name = "zero-1: " if shared else "cpu offload: "
    mesh = mesh_of(device) if shared else None
    return MainWeights(weights, mesh, host=switches.cpu_offload), name + what + where


def decayed_and_not(trained: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, and vectors (biases and norms) without it."""
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
