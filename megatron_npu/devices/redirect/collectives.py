"""Redirect process groups and collectives of ``torch.distributed`` that depend on NCCL."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.nn import functional as distributed_autograd
from torch.nn.parallel import DistributedDataParallel

from megatron_npu.devices import gloo, gloo_or_shared_memory, hccl, version_counters
from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.device_names import target_on

_FLAT = {
    "all_gather_into_tensor": gloo_or_shared_memory.all_gather,
    "reduce_scatter_tensor": gloo_or_shared_memory.reduce_scatter,
}
_GAPS = {"broadcast": gloo.refuse_gaps, "scatter": gloo.scatter_whole_memory}


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements for process groups, and for collectives that the backend must support."""
    yield dist, "init_process_group", _init_process_group(device)
    yield from _in_both_modules("new_group", _new_group(device))
    for name in version_counters.WITHOUT_BUMP:
        collective = getattr(dist, name)
        if device.backend == "gloo" and name in _GAPS:
            collective = _GAPS[name](collective)
        yield from _in_both_modules(name, version_counters.bump_version(collective))
    if device.backend == "hccl":
        yield from _in_both_modules("all_reduce", hccl.all_reduce_float64(dist.all_reduce))
        yield from _in_both_modules("reduce_scatter", hccl.scatter_sums_of_parts(dist.reduce_scatter))
    if device.backend == "gloo":
        for name, through_memory in _FLAT.items():
            yield from _in_both_modules(name, through_memory(gloo.ignore_shape(getattr(dist, name))))
        yield from _in_both_modules(
            "all_reduce", gloo.refuse_gaps(gloo_or_shared_memory.all_reduce(dist.all_reduce))
        )
        manager = gloo_or_shared_memory.coalescing_manager(dist.distributed_c10d._coalescing_manager)
        yield from _in_both_modules("_coalescing_manager", manager)
        yield from _in_both_modules("all_gather", gloo.gather_unequal(dist.all_gather))
        yield from _in_both_modules("isend", gloo.hold_sent_memory(dist.isend))
        exchange = distributed_autograd._AlltoAll
        yield exchange, "forward", staticmethod(gloo.all_to_all_in_groups(exchange.forward))
        yield dist, "barrier", gloo.drop_device_ids(dist.barrier)
        yield DistributedDataParallel, "__init__", gloo.outlive_reducer(DistributedDataParallel.__init__)


def _in_both_modules(name: str, value: Callable[..., Any]) -> Iterator[Replacement]:
    """Yield the replacements of a function that torch provides under two names.

    torch's own modules use the one in ``distributed_c10d``.
    """
    yield dist, name, value
    yield dist.distributed_c10d, name, value


def _init_process_group(device: Device) -> Callable[..., Any]:
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        options = _translate(signature.bind(*args, **kwargs).arguments, device)
        gloo.wait_at_exit()
        gloo.copy_with_one_thread()
        # torch without a name would take every backend it was built with
        with gloo.naming_interfaces():
            return original(**{**options, "backend": options.get("backend") or device.backend})

    return init_process_group


def _new_group(device: Device) -> Callable[..., Any]:
    original = dist.new_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return original(**_translate(signature.bind(*args, **kwargs).arguments, device))

    return new_group


def _translate(options: dict[str, Any], device: Device) -> dict[str, Any]:
    """Convert process-group options to options that this device accepts."""
    options = {**options}
    if options.get("backend") is not None:
        options["backend"] = _backend_for(options["backend"], device)
    if not type(options.get("pg_options")).__module__.startswith("torch_npu"):
        options.pop("pg_options", None)  # options of ProcessGroupNCCL fit no other backend
    if "device_id" in options:
        options["device_id"] = None if device.is_host else target_on(device)(options["device_id"])
    return options


def _backend_for(asked: str, device: Device) -> str:
    """Return the backend, or the backends by device (``cpu:gloo,cuda:nccl``), that replaces the requested
    backend.
    """
    if device.is_host and ("nccl" in asked or ":" in asked):
        return device.backend  # "cpu:gloo,cuda:nccl" names two devices; here there is one
    return asked.replace("nccl", device.backend).replace("cuda:", f"{device.name}:")
