"""Compute one step of Adam or AdamW for lists of tensors, with a reference and one kernel per device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megatron_npu.ops import verify
from megatron_npu.ops.dispatch import Operation, takes_kernel
from megatron_npu.ops.triton.adam import Numbers, Tensors, takes, update

__all__ = [
    "AdamStep",
    "Known",
    "Tensors",
    "has_kernel",
    "is_plain",
    "takes",
    "update_adam",
    "update_by_kernel",
]


@dataclass(frozen=True)
class AdamStep:
    """Settings of an Adam step for one parameter group.

    Attributes:
        number: the number of the step, counted from 1; None means no bias correction.
        lr, betas, eps, weight_decay: as defined in the papers.
        decoupled: whether the decay is applied to the parameter (AdamW) or added to the gradient (Adam).
    """

    number: int | None
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool


def _adam_reference(
    targets: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: AdamStep,
) -> None:
    """Perform one Adam step in place, by evaluating the formulas one after another."""
    beta1, beta2 = step.betas
    correction1 = 1.0 if step.number is None else 1 - beta1**step.number
    correction2 = 1.0 if step.number is None else 1 - beta2**step.number
    for target, grad, m, v in zip(targets, grads, first, second, strict=True):
        if step.decoupled:
            target.mul_(1 - step.lr * step.weight_decay)
        elif step.weight_decay:
            grad = grad + step.weight_decay * target
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = v.sqrt().div_(math.sqrt(correction2)).add_(step.eps)
        target.addcdiv_(m, denominator, value=-step.lr / correction1)


update_adam = Operation("adam", _adam_reference)


@update_adam.on("cpu", note="`torch._fused_adamw_`, `torch._fused_adam_`")
def _adam_torch(
    targets: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: AdamStep,
) -> None:
    """Perform one Adam step with torch's fused kernels, in one pass over memory."""
    # They always correct by 1 - betaᵗ; at t = inf that is exactly 1.
    number = math.inf if step.number is None else float(step.number)
    at = torch.tensor(number, dtype=torch.float32, device=targets[0].device)
    update = torch._fused_adamw_ if step.decoupled else torch._fused_adam_
    # The kernel reads the steps and never writes them, so one tensor serves all.
    update(
        targets,
        grads,
        first,
        second,
        [],
        [at] * len(targets),
        lr=step.lr,
        beta1=step.betas[0],
        beta2=step.betas[1],
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
    )


@update_adam.on(
    "cuda", note="one Triton kernel for all fp32 weights and their 16-bit copies⁶, else `torch._fused_adamw_`"
)
def _adam_cuda(
    targets: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: AdamStep,
) -> None:
    """Perform one Adam step on a GPU, with the same kernel for 16-bit and fp32 states.

    The results are therefore bitwise identical to those with fp32 states.
    """
    rows = [Tensors(*row, None) for row in zip(targets, grads, first, second, strict=True)]
    if rows and takes_kernel("adam", targets[0]) and all(map(takes, rows)):
        update_by_kernel(rows, step, 1.0)
    else:
        _adam_torch(targets, grads, first, second, step)


class Known(NamedTuple):
    """Kernel inputs of a parameter, cached between steps, with the values on which they depend.

    Attributes:
        state: the parameter's optimizer state.
        copy: the 16-bit tensor that the step rounds the parameter to, or None if there is none.
        tensors: all inputs, with the weight in place of the gradient, which may change between steps.
    """

    state: dict[str, Any]
    copy: Tensor | None
    tensors: Tensors

    def stands(self, state: dict[str, Any] | None, copy: Tensor | None) -> bool:
        """Return True if the cached tensors are still the same objects at the same addresses."""
        weight, _, first, second, rounded = self.tensors
        return (
            state is self.state
            and copy is self.copy
            and (state["exp_avg"] is first and state["exp_avg_sq"] is second)
            and state.get("master_param", weight) is weight
            and first.device == second.device == weight.device
            and (rounded is None or rounded.device == weight.device)
        )


def is_plain(grad: Tensor | None) -> TypeGuard[Tensor]:
    """Return True if a gradient is an ordinary, contiguous fp32 tensor, as the kernel requires."""
    return type(grad) is Tensor and grad.dtype is torch.float32 and grad.is_contiguous()


def has_kernel(parameter: Tensor) -> bool:
    """Return True if our Triton kernel should perform the optimizer steps on a GPU.

    The kernel is not used while results are verified.
    """
    if parameter.device.type != "cuda" or verify.watches("adam", "adam"):
        return False
    return takes_kernel("adam", parameter)


def update_by_kernel(rows: list[Tensors], step: AdamStep, factor: float) -> None:
    """Perform one Adam step in a single kernel launch, with the gradients multiplied by ``factor``."""
    beta1, beta2 = step.betas
    correction1 = 1.0 if step.number is None else 1 - beta1**step.number
    correction2 = 1.0 if step.number is None else 1 - beta2**step.number
    numbers = Numbers(
        factor=factor,
        decay=1 - step.lr * step.weight_decay if step.decoupled else 1.0,
        l2=0.0 if step.decoupled else step.weight_decay,
        keep1=beta1,
        new1=1 - beta1,
        keep2=beta2,
        new2=1 - beta2,
        size_of_step=step.lr / correction1,
        root=1 / math.sqrt(correction2),
        eps=step.eps,
    )
    update(rows, numbers)


@update_adam.on("npu", note="`torch._fused_adamw_`; without bias correction `npu_apply_adam_w`")
def _adam_npu(
    targets: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: AdamStep,
) -> None:
    """Perform one Adam step with torch_npu's AdamW kernels.

    For Adam, which has no kernel, the weight decay is added to the gradient first.
    """
    if not step.decoupled and step.weight_decay:
        grads = list(torch._foreach_add(grads, targets, alpha=step.weight_decay))
    step = replace(step, weight_decay=step.weight_decay if step.decoupled else 0.0, decoupled=True)
    if step.number is not None:
        _adam_torch(targets, grads, first, second, step)
        return
    import torch_npu

    # Powers of zero make both corrections exactly 1, whichever step the kernel counts them from.
    numbers = (0.0, 0.0, step.lr, step.weight_decay, *step.betas, step.eps)
    for target, grad, m, v in zip(targets, grads, first, second, strict=True):
        torch_npu.npu_apply_adam_w(*numbers, grad, None, False, False, out=(target, m, v))
