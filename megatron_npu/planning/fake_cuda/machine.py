"""Run this process as a rank on simulated CUDA devices: ``machine.running(rank, ranks)``.

Tensors are torch's fake tensors: each operation returns the shape, dtype, strides and device that CUDA would
return, without values; mixed devices, or shapes or dtypes that do not match, raise an error as on a GPU.
Communication uses torch's fake process group, so one process can represent any rank of any layout.

Every value that a program reads (``item``) is 0: no loss, no gradient, no overflow (``_answer``).
``library.load`` must be called before torch is imported.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_npu.devices import cpu_cuda_api
from megatron_npu.devices.cpu import CpuDevice
from megatron_npu.devices.cuda_types import tensor_types
from megatron_npu.planning import alone


class Tensors(FakeTensorMode):
    """Fake tensors whose values can be read, and counts of the operations on CUDA tensors.

    Attributes:
        operations: how often each aten operation returned a CUDA tensor.
        received: the int64 values that a broadcast returns, by its number of elements.
        asked: a function that is called with each operation that requests a value which was not computed.
    """

    asked: Callable[[str], None] | None = None

    def __init__(self, received: dict[int, list[int]]) -> None:
        # a module's own buffers (positions, masks) may have been made before the mode was entered
        super().__init__(allow_non_fake_inputs=True)
        self.operations: Counter[str] = Counter()
        self.received = received

    @property
    def avoid_device_init(self) -> bool:
        return True  # torch would look for a driver if ``torch.cuda.is_available()`` says yes

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._tell(func, _known(args[0]) is None)
            return _answer(args[0])
        if func is torch.ops.aten.equal.default:
            self._tell(func, True)
            return True
        result = super().dispatch(func, types, args, kwargs or {})
        _keep_value(func, args, result, self.received)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, Tensor) and first.device.type == "cuda":
            self.operations[str(func)] += 1
        return result

    def _tell(self, func: Any, unknown: bool) -> None:
        if unknown and self.asked is not None:
            self.asked(str(func))


_ARITHMETIC = {
    torch.ops.aten.gt: operator.gt,
    torch.ops.aten.mul: operator.mul,
}


def _keep_value(func: Any, args: Any, result: Any, received: dict[int, list[int]]) -> None:
    """Record the value that all elements of a tensor are known to have, until the tensor is modified.

    The number of tokens per expert is such a value if experts have a capacity. Tensors received from another
    rank have a list of values if the caller has provided the list.
    """
    packet = getattr(func, "overloadpacket", func)  # of FlexAttention there is only one
    if packet is torch.ops.c10d.broadcast_:
        _note_received(args[0], received)
    elif packet in _VALUES:
        _VALUES[packet](args, result)
    elif packet in _ARITHMETIC:
        _compute(_ARITHMETIC[packet], args, result)
    elif packet is not func and func._schema.is_mutable:
        for tensor in args:
            if hasattr(tensor, "value"):
                del tensor.value


def _note_received(tensors: list[Any], received: dict[int, list[int]]) -> None:
    for tensor in tensors:
        tensor.value = received.get(tensor.numel(), 0) if tensor.dtype is torch.int64 else 0


def _compute(operation: Callable[[Any, Any], Any], args: Any, result: Any) -> None:
    """Record the result of arithmetic on known values.

    285068c8 computes with the sizes that it receives.
    """
    numbers = [_known(each) if isinstance(each, Tensor) else each for each in args[:2]]
    if not any(number is None or isinstance(number, list) for number in numbers):
        result.value = operation(*numbers)


def _fill(args: Any, result: Any) -> None:
    result.value = args[1]


def _affirm(args: Any, result: Any) -> None:
    result.value = True


def _add_over_ranks(args: Any, result: Any) -> None:
    """Multiply a known value by the number of ranks, because every rank contributes the same value."""
    size = dist.ProcessGroup.unbox(args[1]).size()
    for tensor in args[0]:
        if hasattr(tensor, "value"):
            tensor.value *= size


def _hand_on(args: Any, result: Any) -> None:
    value = _known(args[0])
    if value is not None:
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            tensor.value = value


def _select(args: Any, result: Any) -> None:
    values = _known(args[0])
    if isinstance(values, list):
        result.value = values[args[2]]
    else:
        _hand_on(args, result)


def _unbind(args: Any, result: Any) -> None:
    values = _known(args[0])
    if not isinstance(values, list):
        return _hand_on(args, result)
    for tensor, value in zip(result, values, strict=True):
        tensor.value = value


# What notes the values of an operation's result, by the operation.
_VALUES: dict[Any, Callable[[Any, Any], None]] = {
    torch.ops.aten.full: _fill,
    torch.ops.aten.all: _affirm,
    torch.ops.c10d.allreduce_: _add_over_ranks,
    torch.ops.aten.select: _select,
    torch.ops.aten.unbind: _unbind,
    torch.ops.prims.device_put: _hand_on,
    **{
        getattr(torch.ops.aten, name): _hand_on
        for name in ("view", "detach", "alias", "_to_copy", "clone", "to")
    },
}


def _known(tensor: Tensor) -> Any:
    """Return the known value of all elements, or a list of values for a vector.

    Return None for unknown values.
    """
    constant = getattr(tensor, "constant", None)
    if constant is not None and constant.numel() == 1:
        return constant.item()
    return getattr(tensor, "value", None)


def _answer(tensor: Tensor) -> bool | int | float:
    """Return the result of ``item`` for a tensor, if its value is known.

    An unknown value is zero in the tensor's dtype.
    """
    known = _known(tensor)
    return _zero(tensor.dtype) if known is None else known


def _zero(dtype: torch.dtype) -> bool | int | float:
    return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0


def _convert(
    module: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Convert a module in place, like ``Module._apply``, but without replacing its parameter objects.

    The implementation in torch 2.13 swaps fake tensors, which fails if weak references to a tensor exist,
    such as those of the fake tensor mode.
    """
    for each in module.modules() if recurse else [module]:
        with torch.no_grad():
            for tensor in [*each._parameters.values(), *each._buffers.values()]:
                if tensor is not None:
                    converted = fn(tensor)
                    tensor.data, tensor.fake_device = converted, converted.device  # type: ignore[attr-defined]
    return module


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make torch report eight GPUs inside the ``with`` block, in which processes may be forked."""
    for higher in (flex_attention, flex_attention_backward):
        higher.python_key_table.setdefault(Tensors, higher.python_key_table[FakeTensorMode])
    with contextlib.ExitStack() as stack:
        for owner, name, value in [*_namespace(), *_collectives()]:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def running(rank: int = 0, ranks: int = 1, received: dict[int, list[int]] | None = None) -> Iterator[Tensors]:
    """Act as rank ``rank`` of ``ranks`` on the first GPU inside the ``with`` block.

    Call this inside ``installed``.

    Args:
        received: see ``Tensors``.
    """
    variables: dict[str, object] = {"MEGATRON_NPU_DEVICE": "cuda"}
    if ranks > 1:  # as a launcher, who is not there for one
        variables |= {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}  # named, but nobody meets there
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        Tensors(received or {}) as tensors,
    ):
        yield tensors


def _namespace() -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements for functions in torch.cuda.

    The replacements are the CPU's functions, except for functions that describe GPUs.
    """
    cpu = CpuDevice()
    names = cpu_cuda_api.namespace(cpu, lambda: 0, lambda: torch.default_generator)
    properties = types.SimpleNamespace(
        name="fake", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132
    )
    names |= tensor_types("cuda")
    names |= {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "get_device_name": lambda device=None: "fake",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "set_device": lambda device: None,
    }
    for path, value in names.items():
        *parents, name = path.split(".")
        yield functools.reduce(getattr, parents, torch.cuda), name, value
    yield torch.backends.cuda, "is_built", lambda: True
    make = torch.tensor
    yield torch, "tensor", lambda data, pin_memory=False, **options: make(data, **options)
    yield torch.Tensor, "pin_memory", lambda self, device=None: self
    yield torch.Tensor, "is_pinned", lambda self, device=None: False
    yield torch.Tensor, "record_stream", lambda self, stream: None
    yield torch.nn.Module, "_apply", _convert


def _collectives() -> Iterator[tuple[Any, str, Any]]:
    """Yield functions that create fake process groups for any backend, and object collectives that make
    copies.
    """
    init, new = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        init("fake", store=FakeStore(), rank=rank, world_size=ranks)

    def new_group(ranks: Any = None, *_: Any, **options: Any) -> Any:
        return new(ranks, backend="fake", group_desc=options.get("group_desc"))

    @contextlib.contextmanager
    def coalescing_manager(*_: Any, **__: Any) -> Iterator[Any]:
        """Run the collectives in the ``with`` block one after another.

        torch 2.13 has no fake coalesced collectives.
        """
        yield types.SimpleNamespace(wait=alone.nothing)

    functions: dict[str, Callable[..., Any]] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "all_gather_object": alone.all_gather_object,
        "gather_object": alone.gather_object,
        "broadcast_object_list": alone.nothing,
        "_coalescing_manager": coalescing_manager,
    }
    for name, function in functions.items():
        yield dist, name, function
        yield dist.distributed_c10d, name, function
