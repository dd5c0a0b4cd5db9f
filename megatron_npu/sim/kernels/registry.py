"""Which function computes which operation of torch_npu, and how torch's dispatcher learns of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_npu.sim.kernels import checker
from megatron_npu.sim.kernels.limits import LIMITS

_Function = TypeVar("_Function", bound=Callable[..., Any])

# torch_npu defines its operations in npu; some backward formulas of aten's operations it adds to aten.
NAMESPACES = ("npu", "aten")


@dataclass(frozen=True)
class Kernel:
    """The reference of one operation.

    Attributes:
        operation: name and overload without namespace, such as ``npu_apply_adam_w.out``.
        function: the bare computation, on host tensors, without autograd.
        checked: the same behind the operation's limits; this is what torch calls.
    """

    operation: str
    function: Callable[..., Any]
    checked: Callable[..., Any]


KERNELS: dict[str, Kernel] = {}
_libraries: list[torch.library.Library] = []  # a Library takes its kernels with it when it is collected


def kernel(*operations: str) -> Callable[[_Function], _Function]:
    """Declare a function as the computation of operations ``npu::name``, on host tensors.

    It has the parameters of the operation's schema, with the same names, order and defaults: torch leaves out
    arguments that equal the default. Tensors alias the device's memory; it returns fresh host tensors, or the
    arguments that it has written. torch_npu keeps schema, Python entry point and autograd formula.
    """

    def declare(function: _Function) -> _Function:
        for operation in operations:
            KERNELS[operation] = Kernel(operation, function, _with_limits(operation, function))
        return function

    return declare


def _with_limits(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its operation's limits checked first; as it is where there are none."""
    table = LIMITS.get(operation)
    if table is None:
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        checker.check(operation, table, bound.arguments)
        return function(*args, **kwargs)

    return checked


def register_all() -> list[str]:
    """Register every declared kernel as the CPU kernel of each schema that this torch_npu has.

    The simulator's device kernel calls them with host views of the device's memory, below autograd.

    Returns:
        The operations that this torch_npu does not define; the tested version defines all.
    """
    known = set(torch._C._dispatch_get_all_op_names())
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    undefined = set(KERNELS)
    for namespace in NAMESPACES:
        library = torch.library.Library(namespace, "IMPL")
        _libraries.append(library)
        for operation, each in KERNELS.items():
            full = f"{namespace}::{operation}"
            if full not in known:
                continue
            undefined.discard(operation)
            if not has_kernel(full, "CPU"):
                library.impl(operation, each.checked, "CPU")
            if namespace == "npu" and not has_kernel(full, "AutogradCPU"):
                library.impl(operation, _refuse_host(operation), "AutogradCPU")
    return sorted(undefined)


def _refuse_host(operation: str) -> Callable[..., Any]:
    """Return a kernel for calls with host tensors only, which hardware cannot run either.

    The simulator's device kernel goes to the CPU key directly, past this one.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"Could not run 'npu::{operation}' with arguments from the 'CPU' backend: move them to the NPU"
        )

    return refuse
