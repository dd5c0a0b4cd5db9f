"""Implement ``torch.cuda`` functions for a CPU, with torch's signatures."""

from __future__ import annotations

import collections
import contextlib
import os
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch

from megatron_npu.base import malloc
from megatron_npu.devices import device_monitor
from megatron_npu.devices.base import Device
from megatron_npu.devices.cpu_device_index import CpuDeviceIndex
from megatron_npu.devices.cuda_types import tensor_types


def namespace(
    cpu: Device, index: Callable[[], int], generator: Callable[[], torch.Generator]
) -> dict[str, Any]:
    """Return the replacements for names in ``torch.cuda``; see ``Device.cuda_namespace``.

    Args:
        cpu: the device.
        index: returns the index of this process.
        generator: returns the device's generator.
    """
    return {
        **_device_names(cpu, index),
        **_rng_names(cpu, index, generator),
        **_stream_names(),
        **_memory_names(cpu),
        **device_monitor.cpu_sensors(),
        **tensor_types("cpu"),
        "nvtx.range_push": _no_operation,
        "nvtx.range_pop": _no_operation,
        "nvtx.mark": _no_operation,
    }


class Event:
    """Replacement for ``torch.cuda.Event`` that records a point in time.

    Earlier work is always complete, because a CPU has no queue.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the time between this event and ``end`` in milliseconds."""
        return (end._time - self._time) * 1e3


class Stream:
    """The only stream of a CPU, which replaces ``torch.cuda.Stream``.

    Calls are synchronous, so that a stream never has to wait.
    """

    cuda_stream = stream_id = device_index = priority = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority that a stream may have.

        Both priorities are equal on a CPU.
        """
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _no_operation(*_: Any, **__: Any) -> None:
    """Do nothing, because the operation is not needed on a CPU."""


class _DeviceContext(contextlib.nullcontext):
    """Context manager for ``with torch.cuda.device(i)`` that does nothing, because there is only one CPU
    device.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _device_names(cpu: Device, index: Callable[[], int]) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count() or 1,
    )

    def set_device(device: Any) -> None:
        cpu.set_current(_index_of(device))

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        return properties

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        # Only --moe-grouped-gemm asks, to learn whether bf16 is native. The same as on the npu.
        return (8, 0)

    def get_device_name(device: Any = None) -> str:
        return "cpu"

    return {
        # Where Megatron branches on this, its branch for no CUDA is right for a CPU.
        "is_available": lambda: False,
        "set_device": set_device,
        "current_device": lambda: CpuDeviceIndex(index()),
        "device": _DeviceContext,
        "device_count": cpu.count,
        "get_device_properties": get_device_properties,
        "get_device_capability": get_device_capability,
        "get_device_name": get_device_name,
        "synchronize": _no_operation,
        "_lazy_init": _no_operation,
        "_lazy_call": _call_now,
        "check_error": _no_operation,
        "ipc_collect": _no_operation,
    }


def _index_of(which: Any) -> int:
    """Return the index that an argument of ``torch.cuda.set_device`` refers to: an index, a name or a
    device.
    """
    if isinstance(which, CpuDeviceIndex):
        return int(which)
    return which if isinstance(which, int) else torch.device(which).index or 0


def _call_now(callable: Callable[[], Any], **_: Any) -> None:
    """Immediately call a function that torch would otherwise defer until CUDA is initialized."""
    callable()


def _rng_names(
    cpu: Device, index: Callable[[], int], generator: Callable[[], torch.Generator]
) -> dict[str, Any]:
    """Return replacements for the functions in torch.cuda.random.

    The functions ignore the device argument, because a process has only one device.
    """

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return cpu.rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        cpu.set_rng_state(new_state)

    def get_rng_state_all() -> list[torch.Tensor]:
        return [cpu.rng_state() for _ in range(max(cpu.count(), index() + 1))]

    def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
        for number, state in enumerate(new_states):
            if number == index():
                cpu.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        cpu.manual_seed(int(seed))

    def seed() -> None:
        generator().seed()

    def initial_seed() -> int:
        return generator().initial_seed()

    names: dict[str, Any] = {
        "get_rng_state": get_rng_state,
        "get_rng_state_all": get_rng_state_all,
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": seed,
        "seed_all": seed,
        "initial_seed": initial_seed,
    }
    names |= {f"random.{name}": function for name, function in names.items()}
    names["default_generators"] = collections.defaultdict(lambda: torch.default_generator)
    return names


def _stream_names() -> dict[str, Any]:
    only = Stream()

    def current_stream(device: Any = None) -> Stream:
        return only

    def stream_context(stream: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    return {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "stream": stream_context,
        "set_stream": _no_operation,
        "is_current_stream_capturing": lambda: False,
    }


def _memory_names(cpu: Device) -> dict[str, Any]:
    def memory_stats(device: Any = None) -> dict[str, int]:
        now = cpu.memory()
        known = {
            "allocated_bytes.all.current": now.allocated,
            "allocated_bytes.all.peak": now.peak,
            "reserved_bytes.all.current": now.reserved,
            "reserved_bytes.all.peak": now.peak,
        }
        # The other counters of the CUDA allocator are zero: a CPU has no such thing.
        return collections.defaultdict(int, known)

    def memory_allocated(device: Any = None) -> int:
        return cpu.memory().allocated

    def memory_reserved(device: Any = None) -> int:
        return cpu.memory().reserved

    def peak(device: Any = None) -> int:
        return cpu.memory().peak

    def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
        return "\n".join(f"{name:<32} {number:>16,d}" for name, number in memory_stats().items())

    def reset(device: Any = None) -> None:
        cpu.reset_peak_memory()

    names = {
        "memory_stats": memory_stats,
        "memory_summary": memory_summary,
        "memory_allocated": memory_allocated,
        "memory_reserved": memory_reserved,
        "memory_cached": memory_reserved,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "max_memory_cached": peak,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "reset_accumulated_memory_stats": _no_operation,  # counters that are always zero
        "empty_cache": malloc.trim,
    }
    return names | {f"memory.{name}": function for name, function in names.items()}
