"""Implement stochastic gradient descent (SGD) with the interface of apex's FusedSGD."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.dispatch import Make, Operation
from megatron_npu.ops.optimizers.fused_optimizer import FusedOptimizer, update_fused
from megatron_npu.ops.optimizers.multi_tensor import local_parts


@dataclass(frozen=True)
class SgdStep:
    """Settings of an SGD step for one parameter group.

    Attributes:
        lr: the learning rate.
        momentum, dampening, weight_decay, nesterov: see ``torch.optim.SGD``.
        decay_after: whether weight decay is applied after the momentum, not through it.
        first: whether there is no momentum yet, so that it becomes the gradient.
    """

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    decay_after: bool
    first: bool


class FusedSGD(FusedOptimizer):
    """SGD with momentum (Sutskever et al. 2013, as implemented by torch) in one fused call per group.

    A drop-in replacement for ``apex.optimizers.FusedSGD``. Its state, ``momentum_buffer`` in fp32, is also
    that of ``torch.optim.SGD``.

    Args:
        params: parameters or groups.
        lr: the learning rate.
        momentum, dampening, weight_decay, nesterov: see ``torch.optim.SGD``.
        wd_after_momentum: whether weight decay is applied after the momentum, not through it.
        materialize_master_grads: must be True, the default; False is for apex's amp, which no longer exists.
        set_grad_none: whether ``zero_grad()`` drops gradients.

    Raises:
        ValueError: Nesterov is requested without momentum or with dampening, or an option is not supported.
    """

    _options = ("set_grad_none", "wd_after_momentum")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening):
            raise ValueError("nesterov requires a nonzero momentum and zero dampening")
        if not materialize_master_grads:
            raise ValueError("FusedSGD does not support materialize_master_grads=False")
        self.wd_after_momentum = wd_after_momentum
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        fresh = [p for p in parameters if self.state[p].get("momentum_buffer") is None]
        known = [p for p in parameters if self.state[p].get("momentum_buffer") is not None]
        self._update(group, fresh, True)
        self._update(group, known, False)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], first_step: bool) -> None:
        step = SgdStep(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            decay_after=self.wd_after_momentum,
            first=first_step,
        )
        update_fused(
            [self._row(parameter, group["momentum"]) for parameter in parameters],
            lambda targets, grads, buffers=(): _sgd(targets, grads, list(buffers), step),
        )

    def _row(self, parameter: Tensor, momentum: float) -> tuple[Tensor, ...]:
        """Return this rank's parts of a parameter, its gradient and, with momentum, its buffer."""
        grad = self._dense_gradient(parameter)
        if not momentum:
            return local_parts((parameter, grad))
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            precise = torch.promote_types(parameter.dtype, torch.float32)
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=precise)
        return local_parts((parameter, grad, state["momentum_buffer"]))


def _sgd_reference(
    targets: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    step: SgdStep,
) -> None:
    """Perform one SGD step in place, by evaluating the formulas one after another.

    ``buffers`` is empty without momentum and is filled at the first step.
    """
    for i, (target, grad) in enumerate(zip(targets, grads, strict=True)):
        if step.decay_after:
            target.mul_(1 - step.lr * step.weight_decay)
        elif step.weight_decay:
            grad = grad + step.weight_decay * target
        if step.momentum:
            if step.first:
                buffers[i].copy_(grad)
            else:
                buffers[i].mul_(step.momentum).add_(grad, alpha=1 - step.dampening)
            grad = grad + step.momentum * buffers[i] if step.nesterov else buffers[i]
        target.add_(grad, alpha=-step.lr)


_sgd = Operation("sgd", _sgd_reference)


@_sgd.on("cpu", "cuda", "npu", note="`torch._fused_sgd_`")
def _sgd_torch(
    targets: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    step: SgdStep,
) -> None:
    """Perform one SGD step with torch's fused kernel.

    The kernel makes one pass over memory, or two if decay is applied after the momentum.
    """
    weight_decay = step.weight_decay
    if step.decay_after and weight_decay:
        torch._foreach_mul_(targets, 1 - step.lr * weight_decay)
        weight_decay = 0.0
    torch._fused_sgd_(
        targets,
        grads,
        buffers,
        lr=step.lr,
        momentum=step.momentum,
        dampening=step.dampening,
        weight_decay=weight_decay,
        nesterov=step.nesterov,
        maximize=False,
        is_first_step=step.first,
    )


@_sgd.example()
def _example(make: Make) -> None:
    parameter = torch.nn.Parameter(make(33, 65).detach())
    parameter.grad = make(33, 65).detach()
    FusedSGD([parameter], lr=0.1).step()
