"""Run this process as a rank on simulated CUDA devices: ``machine.running(rank, ranks)``.

Tensors are torch's fake tensors: each operation returns the shape, dtype, strides and device that CUDA would
return, without values; mixed devices, or shapes or dtypes that do not match, raise an error as on a GPU.
Communication uses torch's fake process group, so one process can represent any rank of any layout.

A value that a program reads (``item``) is 0 unless it is known (see ``values``): no loss, no overflow.
``library.load`` must be called before torch is imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron_npu.devices import cpu_cuda_api
from megatron_npu.devices.cpu import CpuDevice
from megatron_npu.devices.cuda_types import tensor_types
from megatron_npu.planning import alone
from megatron_npu.planning.fake_cuda import values


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
            return self._item(func, args[0])
        if func is torch.ops.aten.equal.default:
            return self._equal(func, *args)
        kwargs = kwargs or {}
        found = values.computed(func, args, kwargs)
        result = self._result(func, types, args, kwargs, found)
        if getattr(func, "namespace", "") == "c10d":
            values.communicated(func.overloadpacket, args, self.received)
        else:
            values.note(func, (args, kwargs), result, found)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, Tensor) and first.device.type == "cuda":
            self.operations[str(func)] += 1
        return result

    def _item(self, func: Any, tensor: Tensor) -> bool | int | float:
        known = values.of(tensor)
        self._tell(func, known is None)
        return _zero(tensor.dtype) if known is None else known.item()

    def _equal(self, func: Any, first: Tensor, second: Tensor) -> bool:
        pair = [values.of(first), values.of(second)]
        known = [each for each in pair if each is not None]
        self._tell(func, len(known) < 2)
        return len(known) < 2 or torch.equal(*known)

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any, found: Any) -> Any:
        result = values.of_known_shape(func, args, found, self._empty)
        if result is not None:
            return result
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], values.positions(args[1], self._empty))
        return super().dispatch(func, types, args, kwargs)

    def _empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        empty = torch.ops.aten.empty.memory_format
        made = super().dispatch(empty, (), (list(shape),), {"dtype": dtype, "device": device})
        return cast(Tensor, made)

    def _tell(self, func: Any, unknown: bool) -> None:
        if unknown and self.asked is not None:
            self.asked(str(func))


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


_to_array = torch.Tensor.numpy


def _numpy(self: Tensor, *, force: bool = False) -> Any:
    """Return the known values of a fake tensor as an array, and any other tensor's values as torch does."""
    known = values.of(self)
    if known is None:
        return _to_array(self, force=force)
    with _disable_current_modes():
        return _to_array(known.clone())


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
    yield torch.Tensor, "numpy", _numpy
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
