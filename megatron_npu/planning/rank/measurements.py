"""Measure a rank during training: what its memory is used for, and where in the program it reaches its
peak.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

from megatron_npu.planning.pipeline import BACKWARD, FORWARD, Pass

Address = Callable[[torch.Tensor], int] | None


@dataclass
class Measurements:
    """The measurements of one rank; see ``taken``.

    Attributes:
        weights, gradients, optimizer: the bytes that stay allocated from the first update on.
        logits: the bytes of the largest output of an output layer.
        place: the phase and module in which the peak was reached.
        asked: maps ``file:line`` to the number of times that the program read unknown values there.
        updates: the number of updates.
        addresses: the addresses of persistent memory: ``weights``, ``gradients``, ``optimizer``.
        order: the forward and backward passes of the last iteration, in the order in which they began.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    logits: int = 0
    place: str = "building the model"
    asked: Counter[str] = field(default_factory=Counter)
    updates: int = 0
    addresses: dict[str, list[int]] = field(default_factory=dict)
    order: list[Pass] = field(default_factory=list)


class _Watch:
    """Records where peak memory rises, at the beginning and end of modules and optimizer calls."""

    def __init__(self, found: Measurements, device: str, peak: Callable[[], int], address: Address) -> None:
        self.measured, self._device, self._peak, self._address = found, device, peak, address
        self._seen = 0
        self._phase, self._stack = "building the model", []  # type: ignore[var-annotated]
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._order = _Order()

    def look(self) -> None:
        """Record the current position of the program if peak memory has risen since the last call."""
        peak = self._peak()
        if peak > self._seen:
            self._seen = peak
            where = self._stack[-1] if self._stack else ""
            self.measured.place = f"{self._phase}, {where}" if where else self._phase

    def enter(self, module: torch.nn.Module, _: Any) -> None:
        self.look()
        if not self._stack:
            self._name_all(module)
            if self._phase != "backward" or module not in self._recomputed():
                self._phase = "forward"
        self._stack.append(self._names.get(module) or type(module).__name__)

    def leave(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if self._names.get(module, "").endswith("output_layer"):
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                self.measured.logits = max(self.measured.logits, first.numel() * first.element_size())
        self.look()
        if self._stack:
            self._stack.pop()
        if not self._stack:
            self._phase = "backward"
            if self._names.get(module) == "":
                self._order.passed(module, output)

    def _recomputed(self) -> set[torch.nn.Module]:
        return {module for module, name in self._names.items() if name}

    def _name_all(self, root: torch.nn.Module) -> None:
        if self._names.get(root):
            return  # a layer that is computed once more
        for name, module in root.named_modules():
            for wrapper in ("module.", "_orig_mod."):
                while name.startswith(wrapper):
                    name = name.removeprefix(wrapper)
            self._names.setdefault(module, name)

    def updating(self, *_: Any) -> None:
        self.look()
        self.measured.order = self._order.taken() or self.measured.order
        self._phase = "optimizer step"

    def updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.look()
        self._phase = "after the update"
        self.measured.updates += 1
        if self.measured.updates < 9:  # the optimizers of a chain, in the first iteration
            self.count(optimizer)

    def count(self, *_: Any) -> None:
        """Add up the memory that weights, gradients and optimizer states use permanently."""
        weights, gradients, states = _Storages(self._device), _Storages(self._device), _Storages(self._device)
        found = gc.get_objects()
        for each in found:
            # a fake tensor is a parameter by its instance, not by its class
            if issubclass(type(each), torch.Tensor) and isinstance(each, torch.nn.Parameter):
                weights.add(each)
        for each in weights.tensors:
            gradients.add(getattr(each, "main_grad", None))
            gradients.add(each.grad)
        for each in found:
            if type(each).__name__ in ("_ParamAndGradBuffer", "ParamAndGradBuffer"):
                gradients.add(getattr(each, "grad_data", None))
            if issubclass(type(each), torch.optim.Optimizer):
                for group in each.param_groups:
                    for parameter in group["params"]:
                        states.add(parameter)
                        gradients.add(parameter.grad)
                for state in each.state.values():
                    for value in state.values() if isinstance(state, dict) else ():
                        states.add(value)
        measured = self.measured
        measured.weights = weights.bytes()
        measured.gradients = gradients.bytes(weights)
        measured.optimizer = states.bytes(weights, gradients)
        if self._address is not None:
            kinds = {"optimizer": states, "gradients": gradients, "weights": weights}
            told = {self._address(tensor): kind for kind, each in kinds.items() for tensor in each.tensors}
            measured.addresses = {kind: [at for at, own in told.items() if own == kind] for kind in kinds}


class _Order:
    """Records the order of passes through the model chunks of a stage.

    Chunks are numbered as they first run.
    """

    def __init__(self) -> None:
        self._chunks: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._passes: list[Pass] = []

    def passed(self, root: torch.nn.Module, output: Any) -> None:
        """Record the forward pass of a chunk now, and its backward pass when the gradient of its output
        is known.
        """
        chunk = self._chunks.setdefault(root, len(self._chunks))
        passes = self._passes
        batch = sum(kind == FORWARD and own == chunk for kind, own, _ in passes)
        passes.append((FORWARD, chunk, batch))
        for each in pytree.tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(lambda _: passes.append((BACKWARD, chunk, batch)))
                return

    def taken(self) -> list[Pass]:
        """Return the passes that were recorded since the last call."""
        found, self._passes = self._passes, []
        return found


class _Storages:
    """A collection of storages of tensors on the device, in which each storage is counted once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.sizes: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device:
            return
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
        storage = tensor.untyped_storage()
        self.sizes[storage._cdata] = storage.nbytes()
        self.tensors.append(tensor)

    def bytes(self, *without: _Storages) -> int:
        """Return the number of bytes of the storages that are in none of the sets ``without``."""
        taken = {key for other in without for key in other.sizes}
        return sum(size for key, size in self.sizes.items() if key not in taken)


@contextlib.contextmanager
def taken(device: str, peak: Callable[[], int], address: Address = None) -> Iterator[Measurements]:
    """Measure the memory of a rank inside the ``with`` block.

    Args:
        device: the device type whose memory is measured.
        peak: returns the peak number of bytes in use so far.
        address: returns the address of a tensor's memory. If None, addresses are not recorded.
    """
    found = Measurements()
    watch = _Watch(found, device, peak, address)
    handles = [
        modules.register_module_forward_pre_hook(watch.enter),
        modules.register_module_forward_hook(watch.leave),
        optimizers.register_optimizer_step_pre_hook(watch.updating),
        optimizers.register_optimizer_step_post_hook(watch.updated),
    ]
    try:
        yield found
        watch.look()
    finally:
        for handle in handles:
            handle.remove()
