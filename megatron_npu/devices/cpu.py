"""The plain CPU as a device: gloo, a generator of its own, synchronous streams, resident memory."""

from __future__ import annotations

import collections
import contextlib
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_npu.devices import gauges, heap
from megatron_npu.devices.base import Device, MemoryStatistics
from megatron_npu.devices.cuda_names import no_operation, tensor_types
from megatron_npu.devices.host_index import HostIndex

_CPU = torch.device("cpu")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class CpuDevice(Device):
    """Host memory as device memory.

    torch has one CPU generator, where a GPU run has two: the host's and the device's. Here the default
    generator is the *device's* (dropout draws from it without being told), and ``host_generator`` is
    the host's: for Megatron's ``torch.get_rng_state``, for weights initialised on the host, and for
    DataLoaders (seeds, shuffling, samples that are drawn in this process). With a single one, a DataLoader
    that only the first tensor-parallel rank builds would shift that rank's dropout masks against the others'.

    Attributes:
        index: what ``torch.cuda.current_device()`` answers; it tells the processes of a machine apart.
        host_generator: the host's generator.
        device_generator: the device's generator. Inside ``host_rng`` the two have changed places.
    """

    name = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self.index = 0
        self.device_generator = torch.default_generator
        self.host_generator = torch.Generator()
        self.host_generator.set_state(torch.default_generator.get_state())

    def absence(self) -> str | None:
        return None

    def count(self) -> int:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def torch_device(self) -> torch.device:
        return _CPU

    def set_current(self, index: int) -> None:
        """Remember the index for who asks; every process has the one CPU."""
        self.index = index

    def synchronize(self) -> None:
        """Do nothing: CPU operations have run when they return."""

    def manual_seed(self, seed: int) -> None:
        # Not torch.manual_seed, which seeds the devices too and would come back here.
        self.device_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return self.device_generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.device_generator.set_state(state)

    def host_rng_state(self) -> torch.Tensor:
        return self.host_generator.get_state()

    def set_host_rng_state(self, state: torch.Tensor) -> None:
        self.host_generator.set_state(state)

    @contextlib.contextmanager
    def host_rng(self) -> Iterator[None]:
        if self.host_generator is torch.default_generator:  # the data set of a loader may come here again
            yield
            return
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    def _change_places(self) -> None:
        """Exchange the states of the two generators, and with them what each of them is."""
        device, host = self.device_generator, self.host_generator
        state = device.get_state()
        device.set_state(host.get_state())
        host.set_state(state)
        self.device_generator, self.host_generator = host, device

    def prepare(self) -> None:
        heap.keep_freed_memory()

    def release(self) -> None:
        heap.return_freed_memory()

    def memory(self) -> MemoryStatistics:
        """Return the resident set of this process as allocated and reserved, and its peak."""
        resident = psutil.Process().memory_info().rss
        return MemoryStatistics(resident, resident, max(resident, _peak_resident()))

    def reset_peak_memory(self) -> None:
        """Start the peak again (Linux only: elsewhere the peak of the whole process is kept)."""
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5")  # proc(5): resets the high-water mark of this process

    def cuda_namespace(self) -> Mapping[str, Any]:
        return {
            **_device_names(self),
            **_rng_names(self),
            **_stream_names(),
            **_memory_names(self),
            **gauges.of_the_host(),
            **tensor_types("cpu"),
            "nvtx.range_push": no_operation,
            "nvtx.range_pop": no_operation,
            "nvtx.mark": no_operation,
        }


def _peak_resident() -> int:
    """Return the high-water mark of the resident set, in bytes; 0 where the system does not tell."""
    try:
        line = next(row for row in _STATUS.read_text().splitlines() if row.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1]) * 1024


class Event:
    """A point in time: what was queued before it has always run, because nothing is queued."""

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
        """Return the milliseconds from this event to ``end``."""
        return (end._time - self._time) * 1e3


class Stream:
    """The one order in which the CPU works; waiting for it takes no time."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

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


class _DeviceContext(contextlib.nullcontext):
    """``with torch.cuda.device(i)``: there is no other device to change to."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _device_names(device: CpuDevice) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count() or 1,
    )
    return {
        # Megatron's branches on this are right for a CPU when the answer is no.
        "is_available": lambda: False,
        "set_device": lambda which: device.set_current(_index_of(which)),
        "current_device": lambda: HostIndex(device.index),
        "device": _DeviceContext,
        "device_count": device.count,
        "get_device_properties": lambda *_: properties,
        # Asked for only by --moe-grouped-gemm, whether bf16 is native; as on the npu.
        "get_device_capability": lambda *_: (8, 0),
        "get_device_name": lambda *_: "cpu",
        "synchronize": no_operation,
        "_lazy_init": no_operation,
        "_lazy_call": _call_now,
        "check_error": no_operation,
    }


def _index_of(which: Any) -> int:
    """Return the index in what ``torch.cuda.set_device`` takes: an index, a name or a device."""
    return which if isinstance(which, int) else torch.device(which).index or 0


def _call_now(function: Callable[[], Any], **_: Any) -> None:
    """Run what torch would queue until CUDA is initialised: here that moment never comes."""
    function()


def _rng_names(device: CpuDevice) -> dict[str, Any]:
    def get(device_: Any = None) -> torch.Tensor:
        return device.rng_state()

    def put(new_state: torch.Tensor, device_: Any = None) -> None:
        device.set_rng_state(new_state)

    names: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": get(),
        "set_rng_state": lambda new_state, device="cuda": put(new_state),
        "manual_seed": device.manual_seed,
        "manual_seed_all": device.manual_seed,
        "initial_seed": torch.default_generator.initial_seed,
    }
    names |= {f"random.{name}": function for name, function in names.items()}
    names["default_generators"] = collections.defaultdict(lambda: torch.default_generator)
    return names


def _stream_names() -> dict[str, Any]:
    stream = Stream()
    return {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "set_stream": no_operation,
        "is_current_stream_capturing": lambda: False,
    }


def _memory_names(device: CpuDevice) -> dict[str, Any]:
    def statistics(*_: Any) -> dict[str, int]:
        now = device.memory()
        known = {
            "allocated_bytes.all.current": now.allocated,
            "allocated_bytes.all.peak": now.peak,
            "reserved_bytes.all.current": now.reserved,
            "reserved_bytes.all.peak": now.peak,
        }
        # Counters of the CUDA allocator that a CPU has nothing to say of are zero.
        return collections.defaultdict(int, known)

    def reset(*_: Any) -> None:
        device.reset_peak_memory()

    names = {
        "memory_stats": statistics,
        "memory_allocated": lambda *_: device.memory().allocated,
        "memory_reserved": lambda *_: device.memory().reserved,
        "max_memory_allocated": lambda *_: device.memory().peak,
        "max_memory_reserved": lambda *_: device.memory().peak,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "empty_cache": heap.give_back,
    }
    return names | {f"memory.{name}": function for name, function in names.items()}
