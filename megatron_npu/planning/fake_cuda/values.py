"""Keep the values of small fake tensors that follow from known values.

The tokens per expert decide about shapes. They follow from a routing map, or from an expert's capacity, by
operations on small tensors. Each such operation also runs on the CPU, with the known values of its arguments.
A fake tensor holds the result in its attribute ``value``. Whatever writes an unknown value removes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

aten, c10d = torch.ops.aten, torch.ops.c10d

_LARGEST = 64 << 20  # bytes of integers and conditions whose values are kept
_LARGEST_FLOATS = 4 << 10  # bytes; parameters and activations are not kept

_FACTORIES = {aten.full, aten.zeros, aten.ones, aten.arange, aten.scalar_tensor}
# of equal values on all ranks, these are known: torch's numbers of them
_REDUCTIONS = {name: int(getattr(dist.ReduceOp.RedOpType, name)) for name in ("SUM", "AVG", "MIN", "MAX")}
_LIFTS = {aten.lift_fresh, aten.lift_fresh_copy}  # their argument is a real tensor


@dataclasses.dataclass
class _Memory:
    """The memory that the values of a tensor and of its views share."""

    known: bool = True


@dataclasses.dataclass(frozen=True)
class _Value:
    tensor: Tensor
    memory: _Memory


def of(tensor: Any) -> Tensor | None:
    """Return a CPU tensor with the values of a fake tensor, or None if they are not known."""
    value = getattr(tensor, "value", None)
    if value is not None:
        return value.tensor if value.memory.known else None
    return getattr(tensor, "constant", None)


def give(tensor: Tensor, values: Tensor) -> None:
    """Set the values of a fake tensor."""
    tensor.value = _Value(values, _Memory())  # type: ignore[attr-defined]


def fake(values: Tensor, device: torch.device) -> Tensor:
    """Return a fake tensor on ``device`` with the values of a CPU tensor.

    Call this in the fake tensor mode.
    """
    result = torch.empty(values.shape, dtype=values.dtype, device=device)
    give(result, values)
    return result


def forget(tensor: Any) -> None:
    """Remove the values of a fake tensor and of all its views."""
    value = getattr(tensor, "value", None)
    if value is not None:
        value.memory.known = False


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on CPU tensors with the known values, or None if some are unknown.

    An operation that writes to its arguments then writes to the known values, too. The result of one that
    returns nothing, such as ``_foreach_add_`` with the step counts of an optimizer, is False.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet in _LIFTS:
        return args[0].clone() if args[0].device.type == "cpu" and _is_kept(args[0]) else None
    if packet is None or not _is_computable(func, args, kwargs):
        return None
    if packet is torch.ops.prims.device_put:
        return of(args[0]).clone()  # type: ignore[union-attr]
    if any(argument.name == "pin_memory" for argument in func._schema.arguments):
        kwargs = {**kwargs, "pin_memory": None}
    args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
    result = func(*args, **kwargs)
    return False if result is None else result


def _is_computable(func: Any, args: Any, kwargs: Any) -> bool:
    if func.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    tensors = _tensors((args, kwargs))
    if not tensors:
        return _is_small_factory(func.overloadpacket, args, kwargs)
    if any(not hasattr(each, "value") for each in _written(func, args, kwargs)):
        return False  # torch writes to its constants itself
    values = [of(each) for each in tensors]
    return all(value is not None and _is_kept(value) for value in values)


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return of(leaf) if isinstance(leaf, Tensor) else leaf


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def note(func: Any, given: tuple[Any, Any], result: Any, values: Any) -> None:
    """Set the values of an operation's results.

    Args:
        func: the operation.
        given: its arguments: ``args`` and ``kwargs``.
        result: its result, of fake tensors.
        values: what ``computed`` has returned.
    """
    packet = getattr(func, "overloadpacket", func)  # of FlexAttention there is only one
    if values is not None:
        owners = {of(each).untyped_storage()._cdata: each for each in _known_among(given)}  # type: ignore[union-attr]
        for each, value in zip(pytree.tree_leaves(result), pytree.tree_leaves(values), strict=True):
            if isinstance(each, FakeTensor) and isinstance(value, Tensor):
                _note(each, value, owners)
    elif packet is aten.all:
        give(result, torch.ones(result.shape, dtype=torch.bool))
    elif packet is not func and func._schema.is_mutable:
        for tensor in _written(func, *given):
            forget(tensor)


def _note(tensor: Tensor, values: Tensor, owners: dict[int, Tensor]) -> None:
    """Set the values of one result; ``owners`` are the arguments by the memory of their values."""
    if not _is_kept(values):
        return forget(tensor)
    owner = owners.get(values.untyped_storage()._cdata)
    if owner is not tensor:
        memory = getattr(getattr(owner, "value", None), "memory", None)
        tensor.value = _Value(values, memory or _Memory())  # type: ignore[attr-defined]


Make = Callable[[Any, torch.dtype, torch.device], Tensor]  # a fake tensor of a shape


def of_known_shape(func: Any, args: Any, values: Any, make: Make) -> Any:
    """Return the fake result of an operation whose shape depends on known values, or None for another one."""
    packet = getattr(func, "overloadpacket", None)
    if values is not None and torch.Tag.dynamic_output_shape in func.tags:
        device = next(each.device for each in pytree.tree_leaves(args) if isinstance(each, Tensor))
        return pytree.tree_map(lambda value: make(value.shape, value.dtype, device), values)
    if packet is aten.masked_select and of(args[1]) is not None:
        tensor, mask = args
        count = int(of(mask).expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())  # type: ignore[union-attr]
        return make((count,), tensor.dtype, tensor.device)
    return None


def positions(index: Any, make: Make) -> list[Any]:
    """Return the indices of ``aten.index``, with integers in place of known conditions."""
    found: list[Any] = []
    for each in index:
        known = of(each) if isinstance(each, Tensor) and each.dtype is torch.bool else None
        if known is None:
            found.append(each)
        else:
            found += [make((len(known.nonzero()),), torch.int64, each.device) for _ in range(known.dim())]
    return found


def _is_kept(values: Tensor) -> bool:
    """Return False for large values, and for those that are not finite, such as a mean over nothing."""
    size = values.numel() * values.element_size()
    if values.is_floating_point() or values.is_complex():
        return size <= _LARGEST_FLOATS and bool(values.isfinite().all())
    return size <= _LARGEST


def _is_small_factory(packet: Any, args: Any, kwargs: Any) -> bool:
    if packet not in _FACTORIES:
        return False
    if packet is aten.arange:
        return all(not isinstance(each, float) and abs(each) < _LARGEST // 8 for each in args)
    count = math.prod(args[0]) if isinstance(args[0], (list, tuple)) else 1
    dtype = kwargs.get("dtype")
    whole = packet is aten.full and isinstance(args[1], int) if dtype is None else not dtype.is_floating_point
    return count * 8 <= (_LARGEST if whole else _LARGEST_FLOATS)


def _known_among(given: Any) -> list[Tensor]:
    return [each for each in _tensors(given) if isinstance(each, FakeTensor) and of(each) is not None]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors to which an operation writes, such as ``out``."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def communicated(packet: Any, args: Any, received: dict[int, list[int]]) -> None:
    """Set the values that a collective writes, as if each rank had the values of this one.

    Args:
        packet: the operation.
        args: its arguments.
        received: the int64 values that a broadcast returns, by its number of elements.
    """
    if packet in _COLLECTIVES:
        _COLLECTIVES[packet](args)
    elif packet is c10d.broadcast_:
        _receive(args, received)
    elif packet is not c10d.send:
        for tensor in pytree.tree_leaves(args[0]):
            forget(tensor)


def _receive(args: Any, received: dict[int, list[int]]) -> None:
    sends = dist.ProcessGroup.unbox(args[1]).rank() == args[2]
    for tensor in args[0]:
        if sends and of(tensor) is not None:
            continue
        forget(tensor)
        told = received.get(tensor.numel(), 0) if tensor.dtype is torch.int64 else 0
        if isinstance(told, list):
            give(tensor, torch.tensor(told).view(tensor.shape))
        elif tensor.numel() * 8 <= _LARGEST_FLOATS:
            give(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))


def _reduce(args: Any) -> None:
    """Multiply known values in a sum; the maximum, minimum or mean of equal values is the value itself."""
    size, operation = dist.ProcessGroup.unbox(args[1]).size(), args[2].op()
    for tensor in args[0]:
        known = of(tensor)
        if known is not None and operation == _REDUCTIONS["SUM"]:
            known.mul_(size)
        elif operation not in _REDUCTIONS.values():
            forget(tensor)


def _gather(args: Any) -> None:
    output, own = args[0], of(args[1])
    forget(output)
    if own is not None and output.numel() * output.element_size() <= _LARGEST:
        copies = output.numel() // max(own.numel(), 1)
        give(output, own.repeat(copies, *[1] * (own.dim() - 1)).view(output.shape))


def _gather_each(args: Any) -> None:
    for outputs, own in zip(args[0], args[1], strict=True):
        for output in outputs:
            forget(output)
            if of(own) is not None:
                give(output, of(own).clone())  # type: ignore[union-attr]


_COLLECTIVES: dict[Any, Callable[[Any], None]] = {
    c10d.allreduce_: _reduce,
    c10d._allgather_base_: _gather,
    c10d.allgather_: _gather_each,
}
