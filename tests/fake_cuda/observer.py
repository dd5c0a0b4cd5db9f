"""What a run on fake CUDA has done: asserted as it happens, and counted."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

GPU = torch.device("cuda", 0)


class WrongPlaceError(AssertionError):
    """A tensor is not where, or not what, it has to be on a GPU."""


@dataclass
class Observer:
    """Looks at each module's output and each optimizer's step of this process.

    Attributes:
        forwards: modules that have run, by class.
        backwards: tensors whose gradient has come back to a module's output.
        steps: steps of optimizers.
        stepped: elements of the parameters that optimizers have updated, in the last step of each.
    """

    forwards: Counter[str] = field(default_factory=Counter)
    backwards: int = 0
    steps: int = 0
    stepped: int = 0

    def watch(self) -> None:
        """Begin, for the rest of the process."""
        torch_modules.register_module_forward_hook(self._forward)
        torch_optimizers.register_optimizer_step_pre_hook(self._before_step)
        torch_optimizers.register_optimizer_step_post_hook(self._after_step)

    def _forward(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        name = type(module).__name__
        for parameter in module.parameters(recurse=False):
            _require(parameter.device == GPU, f"a parameter of {name} is on {parameter.device}")
        for tensor in _tensors(output):
            _require(tensor.device == GPU, f"{name} returns a tensor on {tensor.device}")
            if tensor.requires_grad:
                # as it is now: pipelines free what they have sent
                tensor.register_hook(functools.partial(self._backward, name, _of(tensor)))
        self.forwards[name] += 1

    def _backward(self, name: str, output: str, grad: Tensor | None) -> None:
        if grad is None:  # of a sum of which somebody has read the norm alone, computed with it
            return
        _require(_of(grad) == output, f"{name} returns {output}, whose gradient is {_of(grad)}")
        self.backwards += 1

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        for parameter in _parameters(optimizer):
            grad = parameter.grad
            if grad is not None:
                same = (grad.shape, grad.device) == (parameter.shape, GPU)
                _require(same, f"an optimizer has {_of(parameter)} with the gradient {_of(grad)}")

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self.steps += 1
        self.stepped = 0
        for parameter in _parameters(optimizer):
            self.stepped += parameter.numel()
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    same = (value.shape, value.device) == (parameter.shape, GPU)
                    _require(same, f"{name} of {_of(parameter)} is {_of(value)}")


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _tensors(output: Any) -> list[Tensor]:
    many = output if isinstance(output, (tuple, list)) else [output]
    return [tensor for tensor in many if isinstance(tensor, Tensor)]


def _of(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise WrongPlaceError(message)
