"""Save the optimizer state of replaced weights under the names of the original weights.

``get_optimizer_state_dict`` of ``torch.distributed.checkpoint`` is not used: it handles only the model's own
weights, and not those of ZeRO-1 or of an offloaded optimizer; it omits weights that have not been updated
yet, which are then reported as missing when loading; and it counts the step that creates the state of a new
optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Named = dict[str, nn.Parameter]


def rebind(optimizer: torch.optim.Optimizer, before: Named, now: Named) -> None:
    """Make an optimizer update the tensors that have replaced the weights of a model.

    Parameter groups keep their options. Weights that are no longer trained are removed from their group, new
    weights (adapters) are added to the first group, and weights that were in no group are not added to any.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    left = dict(now)
    for group in optimizer.param_groups:
        kept = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        group["params"] = [left.pop(name) for name in kept if name in left]
    optimizer.param_groups[0]["params"].extend(own for name, own in left.items() if name not in before)
    optimizer.state.clear()


def optimizer_state(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Any]:
    """Return this rank's optimizer state as ``{"state": {name: {...}}, "groups": [{...}]}``.

    Afterwards, every weight has state (see ``make_state``), because reading a checkpoint fills existing
    tensors.
    """
    make_state(optimizer)
    names = {id(parameter): name for name, parameter in named.items()}
    return {
        "state": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, named: Named, saved: dict[str, Any]) -> None:
    """Load an optimizer state that ``optimizer_state`` has returned.

    A weight without saved state has no state afterwards.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values)
        for parameter in group["params"]:
            state = saved["state"].get(names[id(parameter)])
            if state is not None:
                optimizer.state[parameter] = dict(state)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create missing optimizer states by running a step that changes no weights.

    The weights get zero gradients and a learning rate of 0, and the step is not counted. torch's
    ``_init_optim_state`` does the same for an optimizer without any state, but leaves the step counts at 1.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fresh = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not fresh:
        return
    gradients = [parameter.grad for parameter in parameters]
    optimizer.zero_grad(set_to_none=True)
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    with _no_learning_rate(optimizer):
        optimizer.step()
    for parameter in fresh:
        step = optimizer.state[parameter].get("step")
        if step is not None:
            optimizer.state[parameter]["step"] = _zero_like(step, 0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@contextlib.contextmanager
def _no_learning_rate(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set the learning rates to 0 inside the ``with`` block, so that an optimizer step changes no weights.

    All group options are restored afterwards.
    """
    options = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = _zero_like(group["lr"], 0.0)
    yield
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update({"step": 0} if "step" in group else {})  # FusedAdam counts by group
        group.update(values)


def _zero_like(value: Any, number: float) -> Any:
    return torch.zeros_like(value) if torch.is_tensor(value) else number
