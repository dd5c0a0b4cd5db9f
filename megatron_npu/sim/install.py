"""Register computations on the host for all operations of device ``npu``, after torch_npu is imported."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from megatron_npu.sim import build, counters, kernels

# Not for the boxed kernel: torch_npu's own implementations of allocation and metadata work as they are on
# host memory, and copies have a kernel of their own.
_KEPT = set(
    """empty.memory_format empty_strided empty_like new_empty new_empty_strided resize_ resize_as_ _to_copy
    to.device to.dtype to.other to.dtype_layout is_pinned pin_memory _pin_memory record_stream is_set_to
    set_data _has_same_storage_numel _unsafe_view _reshape_copy _new_shared_filename_cpu copy_ _copy_from
    _copy_from_and_resize""".split()
)

# Their AutogradPrivateUse1 kernels in torch_npu call into op-plugin past the dispatcher.
_COMPOSITE = ("one_hot", "binary_cross_entropy_with_logits", "renorm")

# An operation has a host computation if one of these keys has a kernel for it.
_HOST_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


@dataclass
class Coverage:
    """How each operation that torch_npu registers is handled, keyed by a full name such as ``aten::add.out``.

    Attributes:
        computed: overridden by the boxed kernel.
        kept: implemented by torch_npu itself: views, allocation and metadata.
        missing: without a computation; a call raises torch_npu's error.
    """

    computed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


COVERAGE = Coverage()


def install() -> None:
    """Register the reference kernels, and then override every operation that has a computation on the
    host.
    """
    library = _library()
    kernels.register()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operation = name.partition("::")
        if namespace not in ("aten", "npu") or not has_kernel(name, "PrivateUse1"):
            continue
        if namespace == "aten" and _is_kept(operation):
            COVERAGE.kept.append(name)
        elif not any(has_kernel(name, key) for key in _HOST_KEYS):
            COVERAGE.missing.append(name)
        else:
            _override(library, name)
    library.sim_install_copy()
    for name in _COMPOSITE:
        if has_kernel(f"aten::{name}", "AutogradPrivateUse1"):
            library.sim_install_composite(name.encode())
    counters.write_report_at_exit()


def _is_kept(operation: str) -> bool:
    return operation in _KEPT or operation.startswith("set_")


def _override(library: ctypes.CDLL, name: str) -> None:
    overridden = library.sim_install(name.encode())
    if overridden > 1:
        raise RuntimeError(f"simulated NPU: {name}: {library.sim_error().decode()}")
    (COVERAGE.kept if overridden else COVERAGE.computed).append(name)


def _library() -> ctypes.CDLL:
    library = build.compute_library()
    library.sim_error.restype = ctypes.c_char_p
    return library
