"""A model, an optimizer and a schedule as the switches want them, and one step of their training."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.lr_scheduler import LRScheduler

from megatron_npu.acceleration.gradients import clip, norm_of, scale
from megatron_npu.acceleration.optimizer_state import load_optimizer_state, optimizer_state
from megatron_npu.acceleration.precision import LossScale, autocast, dtype_of
from megatron_npu.ops.adam import FusedAdam
from megatron_npu.switches import Switches

OptimizerFn = Callable[[Iterable[Any]], torch.optim.Optimizer]
SchedulerFn = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass
class Prepared:
    """What ``prepare`` made of a model: call ``model``, then ``backward`` and ``step``.

    One step of training is::

        for number, batch in enumerate(micro_batches, 1):
            with prepared.accumulating(last=number == len(micro_batches)):
                with prepared.forward_context():
                    loss = prepared.model(**batch).loss / len(micro_batches)
                prepared.backward(loss)
        norm = prepared.step()

    Attributes:
        model: called like the user's own, whose attributes it has, too.
        module: the user's own module, with its weights' own names: what an export saves.
        optimizer: steps through ``step`` alone.
        lr_scheduler: None where none was asked for.
        ledger: what each switch did, one line each.
        switches: as they were given.
        clip_grad: the largest norm of the gradients; 0 leaves them as they are.
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LRScheduler | None
    switches: Switches
    device: torch.device
    clip_grad: float = 0.0
    ledger: list[str] = field(default_factory=list)
    loss_scale: LossScale | None = None

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return what belongs around the forward and backward pass of one micro batch.

        Args:
            last: it is the last one before ``step``: the ranks exchange gradients in it, where they can wait.
        """
        if isinstance(self.model, DataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return what belongs around each forward pass, in training and evaluation."""
        return autocast(self.device, self.switches.mixed_precision)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, fp32 or 16 bits ``[]``."""
        (loss if self.loss_scale is None else self.loss_scale.scaled(loss)).backward()

    def step(self) -> float | None:
        """Clip the gradients, change weights and learning rate, forget the gradients.

        Returns:
            The norm of all gradients before clipping; None after an overflow of fp16, which changes the loss
            scale alone.
        """
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [gradient for gradient in gradients if gradient is not None]
        norm = norm_of(gradients, self.device)
        if self.loss_scale is not None:
            norm /= self.loss_scale.value
            overflow = self.loss_scale.update(norm)
            if overflow:
                self.optimizer.zero_grad(set_to_none=True)
                return None
            scale(gradients, clip(norm, self.clip_grad) / self.loss_scale.used)
        elif self.clip_grad:
            scale(gradients, clip(norm, self.clip_grad))
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, schedule and loss scale, for ``torch.distributed.checkpoint``.

        Each rank holds its own shards. Names are those of the user's module, so that a run goes on with
        another sharding or another number of ranks.
        """
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": optimizer_state(self.optimizer, self.module),
        }
        if self.lr_scheduler is not None:
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, which a checkpoint has filled since."""
        set_model_state_dict(self.model, state["model"])
        load_optimizer_state(self.optimizer, self.module, state["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])


class DataParallel(nn.parallel.DistributedDataParallel):
    """torch's DDP with the attributes of the model in it, such as ``config`` and ``generate``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def prepare(
    model: nn.Module,
    optimizer_fn: OptimizerFn | None,
    lr_scheduler_fn: SchedulerFn | None,
    switches: Switches,
    *,
    device: torch.device,
    lr: float = 1e-4,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    clip_grad: float = 0.0,
) -> Prepared:
    """Return the model as the switches want it, with its optimizer and schedule.

    Args:
        model: on any device; it is changed in place.
        optimizer_fn: called with the parameters that are trained. None: this project's AdamW, whose decay
            leaves out vectors (biases and norms).
        lr_scheduler_fn: called with the optimizer; it steps once per ``Prepared.step``.
        switches: a combination that ``refusals.refuse`` has let through.
        device: of this rank. The process group exists where there are several ranks.
        lr, weight_decay, betas, eps: of the default optimizer.
        clip_grad: the largest norm of the gradients; 0 leaves them as they are.
    """
    ledger: list[str] = []
    if switches.mixed_precision:
        ledger.append(f"mixed precision: autocast to {switches.mixed_precision}, weights in fp32")
    module = model.to(device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    wrapped = data_parallel(module) if ranks > 1 else module
    if ranks > 1:
        ledger.append(f"data parallel: {ranks} ranks exchange gradients")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if optimizer_fn is None:
        optimizer: torch.optim.Optimizer = FusedAdam(
            decayed_and_not(trained, weight_decay), lr=lr, betas=betas, eps=eps
        )
    else:
        optimizer = optimizer_fn(trained)
    return Prepared(
        model=wrapped,
        module=module,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler_fn(optimizer) if lr_scheduler_fn else None,
        switches=switches,
        device=device,
        clip_grad=clip_grad,
        ledger=ledger,
        loss_scale=LossScale() if dtype_of(switches.mixed_precision) is torch.float16 else None,
    )


def data_parallel(model: nn.Module) -> DataParallel:
    """Return a model whose ranks exchange gradients; parts that a batch leaves out are allowed."""
    # torch warns where nothing was left out; whether something will be is not known beforehand
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    return DataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=True, broadcast_buffers=norms
    )


def decayed_and_not(trained: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with decay, vectors (biases, norms) without."""
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
