"""Offload the tensors that autograd saves in a forward pass to the host until the backward pass needs them.

Copies to the host run on their own stream during the forward pass. A layer's tensors are copied back, on
another stream, when the backward pass reaches the layer above it. The results are bitwise identical to those
without offloading.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Moved:
    """A saved tensor that is being copied to the host, is stored there, or is being copied back to the
    device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        # its own order in memory, without the gaps of a slice of something larger
        self.strides = torch.empty_like(tensor, device="meta").stride()
        self.host = self._empty(tensor, "cpu", pin_memory=True)
        out, _ = _streams(self.device)
        out.wait_stream(_of(self.device).current_stream(self.device))
        with _of(self.device).stream(out):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(out)  # its memory is nobody else's before the copy has ended
        self.there = out.record_event()
        self.back: tuple[Tensor, Any] | None = None

    def _empty(self, like: Tensor, device: Any, **options: Any) -> Tensor:
        return torch.empty_strided(like.shape, self.strides, dtype=like.dtype, device=device, **options)

    def fetch(self) -> None:
        """Start copying the tensor back to the device, unless the copy has already started."""
        if self.back is not None:
            return
        _, home = _streams(self.device)
        tensor = self._empty(self.host, self.device)
        home.wait_stream(_of(self.device).current_stream(self.device))  # the memory may be in use there
        home.wait_event(self.there)
        with _of(self.device).stream(home):
            tensor.copy_(self.host, non_blocking=True)
        tensor.record_stream(home)
        self.back = tensor, home.record_event()

    def take(self) -> Tensor:
        """Return the tensor on the device, and drop the stored reference to it."""
        self.fetch()
        assert self.back is not None
        (tensor, event), self.back = self.back, None
        _of(self.device).current_stream(self.device).wait_event(event)
        return tensor


class _Group:
    """The tensors that one layer saves in one forward pass.

    Attributes:
        layer: the layer's index in the stack.
        before: the group of the previous layer, which is needed next.
        modules: the names of the modules whose tensors are in the group.
        moved: the tensors of the group.
    """

    def __init__(self, layer: int, before: _Group | None) -> None:
        self.layer = layer
        self.before = before
        self.modules: set[str] = set()
        self.moved: list[_Moved] = []

    def fetch(self) -> None:
        """Start copying all tensors of the group back to the device, starting with the tensor that was saved
        last.

        Later calls have no effect.
        """
        while self.moved:
            self.moved.pop().fetch()


_SAVING = "megatron_npu_saving"  # of a module: the context in which what its forward saves is moved


def saving(module: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that offloads saved tensors while code outside the forward method computes results
    of ``module``.
    """
    context: contextlib.AbstractContextManager[Any] = getattr(module, _SAVING, contextlib.nullcontext)()
    return context


class Offload:
    """Offload the tensors that selected modules in a stack of layers save for the backward pass.

    Args:
        smallest: the minimum number of elements of an offloaded tensor; smaller tensors stay on the device.
    """

    def __init__(self, smallest: int) -> None:
        self.smallest = smallest
        self.last: _Group | None = None

    def attach(self, module: torch.nn.Module, name: str, layer: int) -> None:
        """Start offloading the tensors that ``module`` saves.

        Args:
            module: a part of a layer; its forward is replaced on the instance.
            name: the name of the part, which is the same in every layer.
            layer: the index of the layer; the backward pass runs from the highest to the lowest.
        """
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._saving(module, name, layer):
                return original(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        # for who computes the module's result with what comes before it
        setattr(module, _SAVING, functools.partial(self._saving, module, f"{name} elsewhere", layer))

    @contextlib.contextmanager
    def _saving(self, module: torch.nn.Module, name: str, layer: int) -> Iterator[None]:
        """Offload the tensors that autograd saves inside the ``with`` block."""
        if not torch.is_grad_enabled():
            yield
            return
        group = self._group(name, layer)
        weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        with saved_tensors_hooks(self._pack(group, weights), _unpack(group)):
            yield

    def _group(self, name: str, layer: int) -> _Group:
        """Return the offload group of the current forward pass, which the first module of each layer
        creates.
        """
        last = self.last
        if last is None or last.layer != layer or name in last.modules:
            self.last = last = _Group(layer, last if last is not None and last.layer < layer else None)
        last.modules.add(name)
        return last

    def _pack(self, group: _Group, weights: set[int]) -> Callable[[Tensor], Any]:
        def pack(tensor: Tensor) -> Any:
            """Offload a tensor unless it is a weight, a boolean mask, too small to be worthwhile, or
            already on the host.
            """
            if tensor.numel() < self.smallest or tensor.dtype is torch.bool or tensor.device.type == "cpu":
                return tensor
            if tensor.untyped_storage().data_ptr() in weights:
                return tensor
            moved = _Moved(tensor)
            group.moved.append(moved)
            return moved

        return pack


def _unpack(group: _Group) -> Callable[[Any], Tensor]:
    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _Moved):
            return saved
        group.fetch()
        if group.before is not None:
            group.before.fetch()
        return saved.take()

    return unpack


def _of(device: torch.device) -> Any:
    """Return the module ``torch.npu`` or ``torch.cuda``, depending on the device type."""
    return getattr(torch, device.type)


@functools.lru_cache(maxsize=8)
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Return the two streams that copy tensors from a device to the host and back."""
    return _of(device).Stream(device), _of(device).Stream(device)
