"""Where reference kernels of torch_npu's own operations are collected and given to torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable)
_references: dict[str, Callable] = {}
_libraries: list[torch.library.Library] = []  # a Library takes its kernels with it when it is collected


def kernel(*names: str) -> Callable[[_Function], _Function]:
    """Declare a function as the computation of operations ``npu::name``, on host tensors.

    It receives the operation's arguments as its schema has them, tensors aliasing the device's memory, and
    returns fresh host tensors or the arguments that it has written. torch_npu keeps the schema, the Python
    entry point and the autograd formula.
    """

    def declare(function: _Function) -> _Function:
        for name in names:
            _references.setdefault(name, function)
        return function

    return declare


def register_all() -> None:
    """Register every declared reference, as a CPU kernel of each schema that this torch_npu has.

    torch_npu defines its operations in ``npu::`` and some of them, for old callers, in ``aten::`` too. An
    operation that this version does not define is left out.
    """
    known = set(torch._C._dispatch_get_all_op_names())
    for namespace in ("npu", "aten"):
        library = torch.library.Library(namespace, "IMPL")
        _libraries.append(library)
        for name, function in _references.items():
            full = f"{namespace}::{name}"
            if full in known and not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
                library.impl(name, function, "CPU")
