"""The state of an optimizer under the names of weights, as checkpoints keep it, whatever the sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_NOT_SAVED = ("params",)


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return ``{"state": {name: {...}}, "groups": [{...}]}``.

    A fresh optimizer gets its state here, as at a first step that changes nothing: reading a checkpoint fills
    tensors that are there.
    """
    if not optimizer.state:
        _make_state(optimizer)
    names = _names(optimizer, module)
    return {
        "state": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
        "groups": [
            {key: value for key, value in group.items() if key not in _NOT_SAVED}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module, saved: dict[str, Any]) -> None:
    """Take over what ``optimizer_state`` returned; a weight without state (frozen since) keeps none."""
    names = _names(optimizer, module)
    optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values)
        for parameter in group["params"]:
            state = saved["state"].get(names[id(parameter)])
            if state is not None:
                optimizer.state[parameter] = dict(state)


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[int, str]:
    """Return id of a parameter of the optimizer -> its name in the module."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Step once with gradients of zero and no learning rate, and count that step as none.

    As torch's own ``_init_optim_state`` does, which leaves the counts at 1.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "step" in group:
            group["step"] = 0
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if torch.is_tensor(state["step"]) else 0
