"""Provide names that scripts from 2022 import but that datasets or transformers have removed since.

A name is added only if a script uses it and the installed version lacks it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.finetune.rapidformer.script_metrics import load_metric


class AdamW(torch.optim.Optimizer):
    """The AdamW optimizer that Transformers had before version 5, with identical steps.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: the usual options, with Transformers' defaults.
        correct_bias: whether to correct the bias of the moments; BERT's original code did not.
        no_deprecation_warning: has no effect; accepted for compatibility.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise UsageError(
                f"AdamW requires lr >= 0, eps >= 0 and betas in [0, 1), but got lr={lr}, betas={betas}, "
                f"eps={eps}. Correct the values."
            )
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**values, "correct_bias": correct_bias})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient, and return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), rate = self.state[parameter], group["betas"], group["lr"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        grad = parameter.grad
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = rate
        if group["correct_bias"]:
            size *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
        if group["weight_decay"]:
            parameter.add_(parameter, alpha=-rate * group["weight_decay"])


def rename_column_(self: Any, original_column_name: str, new_column_name: str) -> None:
    """Rename a column of a ``Dataset``, or of each split of a ``DatasetDict``, in place."""
    renamed = self.rename_column(original_column_name, new_column_name)
    if isinstance(self, dict):
        self.update(renamed)
    else:
        self.__dict__.update(renamed.__dict__)


def supply(text: str) -> list[str]:
    """Add the removed names that a script uses to the modules that used to define them.

    Return the added names.

    Args:
        text: the script's source.
    """
    supplied = []
    for package, owners, name, value in (
        ("datasets", ("datasets",), "load_metric", load_metric),
        ("datasets", ("Dataset", "DatasetDict"), "rename_column_", rename_column_),
        ("transformers", ("transformers",), "AdamW", AdamW),
    ):
        if name not in text or not is_installed(package):
            continue
        module = importlib.import_module(package)
        places = [module if owner == package else getattr(module, owner) for owner in owners]
        for place in (place for place in places if not hasattr(place, name)):
            setattr(place, name, value)
            told = f"{package}.{name}" if place is module else f"{place.__name__}.{name}"
            supplied.append(told)
    return supplied
