"""Adam and AdamW with the interface of apex's and TransformerEngine's FusedAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019) in one fused call per group.

    Drop-in for ``apex.optimizers.FusedAdam``: ``step`` is one integer per parameter group, state is
    ``exp_avg`` and ``exp_avg_sq`` in the parameter's dtype, so checkpoints move between the two.
    Megatron's distributed optimizer relies on exactly that; on torch's own AdamW its resume is wrong
    (megatron-core 0.16: one shared step tensor, counted once per parameter).

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: as in the papers.
        bias_correction: must be True; Megatron never turns it off and torch's kernels always correct.
        adam_w_mode: decoupled weight decay (AdamW); False adds the decay to the gradient (Adam).
        kwargs: ``capturable``, ``master_weights``, ``set_grad_none`` and the like of apex: only their
            off values are meaningful here.

    Raises:
        ValueError: an option that this optimizer cannot honour.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        unsupported = [name for name, value in kwargs.items() if value and name != "set_grad_none"]
        if amsgrad or not bias_correction or unsupported:
            raise ValueError(
                f"FusedAdam has neither amsgrad nor bias_correction=False nor {unsupported or 'others'}: "
                f"given amsgrad={amsgrad}, bias_correction={bias_correction}"
            )
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            parameters = [p for p in group["params"] if p.grad is not None and p.numel()]
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        # The kernel reads the steps and never writes them, so one tensor serves all.
        step = torch.tensor(float(group["step"]), device=parameters[0].device)
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        update(
            parameters,
            [p.grad for p in parameters],
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            [step] * len(parameters),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=float(group["weight_decay"]),
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
