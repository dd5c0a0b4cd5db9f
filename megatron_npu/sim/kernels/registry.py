"""Register functions that compute torch_npu's operations with torch's dispatcher."""

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
    """The reference kernel of one operation.

    Attributes:
        operation: the name and overload without namespace, such as ``npu_apply_adam_w.out``.
        function: the bare computation, on host tensors, without autograd.
        checked: the same function after a check of the operation's limits, which is the one that torch calls.
    """

    operation: str
    function: Callable[..., Any]
    checked: Callable[..., Any]


# Operations of torch_npu that work without a kernel of their own: in op-plugin they are made of other
# operations, only touch metadata, or exist to refuse (the optimizers without out).
_NEED_NO_KERNEL = set(
    """npu_gather_backward npu_gather_sparse_index_backward npu_renorm_backward npu_max_backward
    npu_min_backward npu_bmm_v2_mat1_backward npu_bmm_v2_mat2_backward npu_change_data_ptr npu_dtype_cast_
    npu_format_cast.Tensor npu_format_cast_ _npu_format_cast.aclnn _npu_format_cast.input_dtype
    npu_apply_adam npu_apply_adam_w npu_bert_apply_adam _npu_fusion_attention_v3_infer_output
    _npu_fusion_attention_grad_v3_infer_output""".split()
)
# torch_npu prefixes the operations of its own that compute.
_COMPUTING = ("npu_", "_npu_")
_HOST_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")

KERNELS: dict[str, Kernel] = {}


@functools.cache  # a Library takes its kernels with it when it is collected
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "IMPL")


def kernel(*operations: str) -> Callable[[_Function], _Function]:
    """Declare a function as the kernel of the operations ``npu::name`` for host tensors.

    The function has the parameters of the operation's schema, with the same names, order and defaults,
    because torch omits arguments that equal the default. The tensors alias the device's memory; the function
    returns new host tensors, or the arguments that it has written to. torch_npu keeps its schema, Python
    entry point and autograd formula.
    """

    def declare(function: _Function) -> _Function:
        for operation in operations:
            KERNELS[operation] = Kernel(operation, function, _with_limits(operation, function))
        return function

    return declare


def _with_limits(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with a check of the operation's limits if it has any."""
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
    """Register every declared kernel as the CPU kernel of each schema in the installed torch_npu.

    The simulator's device kernel calls these kernels with host views of the device's memory, below autograd.
    A torch_npu operation that performs a computation but has no kernel raises an error that says so.

    Returns:
        The operations that this torch_npu does not define; the tested version defines all of them.
    """
    known = set(torch._C._dispatch_get_all_op_names())
    for namespace in NAMESPACES:
        library = _library(namespace)
        for operation, each in KERNELS.items():
            if f"{namespace}::{operation}" in known:
                _register(library, namespace, operation, each)
    for name in sorted(known):
        if _lacks_kernel(name):
            _library(NAMESPACES[0]).impl(name.removeprefix("npu::"), _refuse_unknown(name), "PrivateUse1")
    return sorted(name for name in KERNELS if not known & {f"{space}::{name}" for space in NAMESPACES})


def _register(library: torch.library.Library, namespace: str, operation: str, each: Kernel) -> None:
    """Register a kernel, and also an error for host tensors that real hardware would reject.

    The simulator's device kernel calls the CPU key directly, bypassing the AutogradCPU key that raises the
    error.
    """
    full = f"{namespace}::{operation}"
    if not _has_kernel(full, "CPU"):
        library.impl(operation, each.checked, "CPU")
    if namespace == "npu" and not _has_kernel(full, "AutogradCPU"):
        library.impl(operation, _refuse_host(full), "AutogradCPU")


def _lacks_kernel(name: str) -> bool:
    """Return True if torch_npu has an operation for which the simulator has no kernel."""
    namespace, _, operation = name.partition("::")
    return (
        namespace == "npu"
        and operation.startswith(_COMPUTING)
        and operation not in _NEED_NO_KERNEL
        and _has_kernel(name, "PrivateUse1")
        and not any(_has_kernel(name, key) for key in _HOST_KEYS)
    )


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _refuse_host(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"Could not run '{name}' with arguments from the 'CPU' backend: move them to the NPU"
        )

    return refuse


def _refuse_unknown(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no kernel on the simulated NPU. Add one in megatron_npu/sim/kernels (see "
            "docs/internals/simulator-kernels.md), or run this on hardware"
        )

    return refuse
