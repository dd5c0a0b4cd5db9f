"""Adam and AdamW with the interface of apex's and TransformerEngine's FusedAdam."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.dispatch import Make, Operation
from megatron_npu.ops.fused_optimizer import FusedOptimizer, update_fused
from megatron_npu.ops.multi_tensor import local_parts


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step of a parameter group.

    Attributes:
        number: counts from 1; None leaves the bias of the moments uncorrected.
        lr, betas, eps, weight_decay: as in the papers.
        decoupled: the decay is of the parameter (AdamW), not added to the gradient (Adam).
    """

    number: int | None
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool


class FusedAdam(FusedOptimizer):
    """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019) in one fused call per group.

    Drop-in for ``apex.optimizers.FusedAdam``, same order of arguments: ``step`` is one integer per
    parameter group, state is ``exp_avg`` and ``exp_avg_sq`` in fp32. ``load_state_dict`` also takes what
    ``torch.optim.Adam`` and ``AdamW`` saved. Megatron's distributed optimizer relies on exactly that form; on
    torch's own AdamW its resume is wrong (megatron-core 0.16: one shared step tensor, counted once per
    parameter). Distributed tensors (FSDP2's) keep distributed state; each rank updates its part.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: as in the papers.
        bias_correction: divide the moments by 1 - betaᵗ.
        adam_w_mode: decoupled weight decay (AdamW); False adds the decay to the gradient (Adam).
        amsgrad: must be False, as in apex.
        set_grad_none: whether ``zero_grad()`` drops gradients.
        capturable: must be False: nothing here is captured into a CUDA graph.
        master_weights: keep an fp32 copy of each 16-bit parameter in state ``master_param`` (the name
            that TransformerEngine uses) and round from it; without it, 16-bit parameters are updated in
            fp32 and rounded at every step.
        others: options of TransformerEngine's class, which are refused unless they are off.

    Raises:
        ValueError: an option that this optimizer cannot honour.
    """

    _options = ("set_grad_none", "adam_w_mode", "master_weights")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **others: Any,
    ) -> None:
        options = {"amsgrad": amsgrad, "capturable": capturable, **others}
        refused = [name for name, value in options.items() if value and (name, value) not in _SAME_AS_DEFAULT]
        if refused:
            raise ValueError(f"FusedAdam does not have {', '.join(sorted(refused))}")
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        step = AdamStep(
            number=group["step"] if group["bias_correction"] else None,
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(self.adam_w_mode),
        )
        rows = [local_parts(self._row(parameter)) for parameter in parameters]
        rows = [row for row in rows if row[0].numel()]  # a rank may hold no row of a small weight
        update_fused(rows, functools.partial(_adam, step=step))
        for parameter in parameters:
            master = self.state[parameter].get("master_param")
            if master is not None:
                parameter.copy_(master)

    def _row(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what is updated, its gradient and its two moments; make the state at the first step."""
        grad = self._dense_gradient(parameter)
        state = self.state[parameter]
        precise = torch.promote_types(parameter.dtype, torch.float32)
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=precise)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=precise)
        if self.master_weights and parameter.dtype is not precise and "master_param" not in state:
            state["master_param"] = parameter.detach().to(precise)
        return state.get("master_param", parameter), grad, state["exp_avg"], state["exp_avg_sq"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of apex's FusedAdam or of torch's Adam and AdamW.

        Raises:
            ValueError: parameters of one group are at different steps, or amsgrad was on.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group.get("amsgrad"):
                raise ValueError("FusedAdam does not have amsgrad, which the state dict was saved with")
            states = [self.state[p] for p in group["params"] if p in self.state]
            steps = {int(state.pop("step")) for state in states if "step" in state}
            if len(steps) > 1:
                raise ValueError(f"parameters of one group are at different steps: {sorted(steps)}")
            if steps:
                group["step"] = steps.pop()


# What Megatron passes explicitly although it is how this class works anyway.
_SAME_AS_DEFAULT = (("exp_avg_dtype", torch.float32), ("exp_avg_sq_dtype", torch.float32))


def _adam_reference(
    targets: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: AdamStep,
) -> None:
    """One step, in place, formula by formula."""
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


_adam = Operation("adam", _adam_reference)


@_adam.on("cpu", "cuda", note="`torch._fused_adamw_`, `torch._fused_adam_`")
def _adam_torch(
    targets: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: AdamStep,
) -> None:
    """torch's fused kernels: one pass over memory."""
    # They always correct by 1 - betaᵗ; at t = inf that is exactly 1.
    number = math.inf if step.number is None else float(step.number)
    at = torch.tensor(number, device=targets[0].device)
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


@_adam.on("npu", note="`torch._fused_adamw_`; without bias correction `npu_apply_adam_w`")
def _adam_npu(
    targets: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: AdamStep,
) -> None:
    """torch_npu's AdamW kernels; it has none for Adam, whose decay is added to the gradient beforehand."""
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


@_adam.example()
def _example(make: Make) -> None:
    parameter = torch.nn.Parameter(make(33, 65).detach())
    parameter.grad = make(33, 65).detach()
    FusedAdam([parameter], lr=0.1).step()
