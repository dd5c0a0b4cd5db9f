"""Implement Ascend NPUs as a device through torch_npu, without the process-wide effects of
``transfer_to_npu``.

``transfer_to_npu`` disables ``torch.jit.script`` and converts float64 to float32 in the whole process. The
redirection of this package only remaps names of ``torch.cuda``.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_npu.base import settings
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.devices import device_monitor
from megatron_npu.devices.base import Device, MemoryStatistics
from megatron_npu.devices.cuda_types import tensor_types
from megatron_npu.devices.device_names import names_cuda

# The names of torch.cuda that Megatron uses and torch.npu has too.
_SAME_NAME = (
    "is_available set_device current_device device device_count get_device_properties get_device_name "
    "synchronize _lazy_init _lazy_call get_rng_state get_rng_state_all set_rng_state set_rng_state_all "
    "manual_seed manual_seed_all seed seed_all initial_seed "
    "Stream Event ExternalStream current_stream default_stream stream set_stream "
    "memory_stats memory_summary memory_allocated memory_reserved memory_cached "
    "max_memory_allocated max_memory_reserved max_memory_cached "
    "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats empty_cache mem_get_info is_current_stream_capturing "
    "utilization OutOfMemoryError"
).split()
_RANDOM = (
    "get_rng_state get_rng_state_all set_rng_state set_rng_state_all "
    "manual_seed manual_seed_all seed seed_all initial_seed"
).split()
# Ampere's: from there on bf16 is native and Megatron uses no work-arounds.
_CAPABILITY = (8, 0)


class NpuDevice(Device):
    """An Ascend NPU, which communicates through HCCL."""

    name = "npu"
    backend = "hccl"

    def __init__(self) -> None:
        self.simulated = settings.SIM.enabled()

    def absence(self) -> str | None:
        if not is_installed("torch_npu"):
            return "the package torch_npu is not installed"
        try:
            import torch_npu  # noqa: F401  (registers torch.npu)
        except Exception as error:  # a wheel without its CANN fails in many ways, all of which mean absent
            return f"torch_npu cannot be imported ({type(error).__name__}: {error})"
        return None if torch.npu.is_available() else "torch_npu finds no NPU"

    def count(self) -> int:
        return torch.npu.device_count()

    def torch_device(self) -> torch.device:
        return torch.device("npu", torch.npu.current_device())

    def set_current(self, index: int) -> None:
        torch.npu.set_device(index)

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def manual_seed(self, seed: int) -> None:
        torch.npu.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.npu.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.npu.set_rng_state(state)

    def clear_overflow(self) -> None:
        if _saturates():
            torch.npu.utils.clear_npu_overflow_flag()

    def overflowed(self) -> bool:
        return _saturates() and bool(torch.npu.utils.get_npu_overflow_flag())

    def memory(self) -> MemoryStatistics:
        return MemoryStatistics(
            torch.npu.memory_allocated(), torch.npu.memory_reserved(), torch.npu.max_memory_allocated()
        )

    def utilization(self) -> float | None:
        if self.simulated:  # the processors that it computes on are no NPU
            return None
        try:
            return torch.npu.utilization() / 100
        except Exception:  # where the driver does not let a container ask
            return None

    def reset_peak_memory(self) -> None:
        torch.npu.reset_peak_memory_stats()

    def cuda_namespace(self) -> Mapping[str, Any]:
        npu = torch.npu
        names = {name: _taking_cuda(getattr(npu, name)) for name in _SAME_NAME if hasattr(npu, name)}
        names |= {f"random.{name}": names[name] for name in _RANDOM if name in names}
        names["default_generators"] = _DefaultGenerators()
        names["Event"] = _event_of_any_graph(npu.Event)
        names["Stream"] = _stream_on_cuda_device(npu.Stream)
        names["get_device_capability"] = _capability
        names["_lazy_call"] = _call_when_ready
        names["get_device_properties"] = _with_capability(names["get_device_properties"])
        names |= {f"nvtx.{name}": _no_range for name in ("range_push", "range_pop", "mark")}
        names |= _memory_history()
        names["device_memory_used"] = _memory_used
        names |= dict.fromkeys(("temperature", "power_draw", "clock_rate"), device_monitor.unknown)
        return names | tensor_types("npu")


def _event_of_any_graph(event: type) -> type:
    """Return the event class of torch.npu, changed to accept and ignore the argument ``external`` of torch
    2.9.

    ``external`` matters only in graph captures; megatron-core 0.19 passes it for
    ``--fine-grained-activation-offloading``, with and without graphs.
    """

    class Event(event):  # type: ignore[misc]
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            return super().__new__(cls, enable_timing, blocking, interprocess)

    return Event


def _stream_on_cuda_device(stream: type) -> type:
    """Return a class that makes streams of torch.npu, also on devices that are called CUDA's.

    Its instances are all streams of torch.npu, those of ``current_stream`` among them. The contexts of
    megatron-core 0.20's second FSDP pass ``cuda:N``.
    """

    class AnyStream(type(stream)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, stream)

    class Stream(stream, metaclass=AnyStream):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Any:
            return stream(_npu_for_cuda(device), priority, **options)

    return Stream


def _no_range(*_: Any, **__: Any) -> None:
    """Do nothing in place of ``torch.cuda.nvtx``, because NVIDIA's profiler does not support NPUs."""


def _call_when_ready(callable: Callable[[], Any], **_: Any) -> None:
    """Call ``callable`` after the device is initialized."""
    torch.npu._lazy_call(callable)


def _capability(device: Any = None) -> tuple[int, int]:
    return _CAPABILITY


class _DefaultGenerators(Sequence):
    """A view of ``torch.npu.default_generators``, which torch_npu replaces when the device is initialized."""

    def __getitem__(self, index: Any) -> Any:
        torch.npu._lazy_init()
        return torch.npu.default_generators[index]

    def __len__(self) -> int:
        return len(torch.npu.default_generators)


def _memory_used(device: Any = None) -> int:
    """Return the number of bytes of device memory that all processes use."""
    free, total = torch.npu.mem_get_info(_npu_for_cuda(device))
    return total - free


def _memory_history() -> dict[str, Callable[..., Any]]:
    """Return torch_npu's equivalents of the functions that Megatron calls for ``--record-memory-history``.

    Megatron up to 0.16 calls ``_record_memory_history`` with its oldest signature, which torch_npu never had.
    """

    def record(enabled: Any = "all", *args: Any, trace_alloc_max_entries: int = 0, **options: Any) -> None:
        if isinstance(enabled, bool):
            options.pop("trace_alloc_record_context", None)
            enabled = "all" if enabled else None
            options = {"max_entries": trace_alloc_max_entries or 1, **options}
        torch.npu.memory._record_memory_history(enabled, *args, **options)

    def observe(observer: Callable[..., None]) -> None:
        import torch_npu

        torch.npu._lazy_init()
        torch_npu._C._npu_attach_out_of_memory_observer(observer)

    return {
        "memory._record_memory_history": record,
        "memory._snapshot": torch.npu.memory._snapshot,
        "memory._C._cuda_attach_out_of_memory_observer": observe,
    }


def _saturates() -> bool:
    """Return True if the chip returns the largest finite number instead of inf (Ascend chips before 910B)."""
    return not torch.npu.utils.is_support_inf_nan()


def _with_capability(properties: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``properties`` with the version numbers filled in, which torch_npu leaves as None."""

    @functools.wraps(properties)
    def get_device_properties(*args: Any, **kwargs: Any) -> Any:
        known = properties(*args, **kwargs)
        values = {name: getattr(known, name) for name in dir(known) if not name.startswith("_")}
        return types.SimpleNamespace(**values | dict(zip(("major", "minor"), _CAPABILITY, strict=True)))

    return get_device_properties


def _taking_cuda(value: Any) -> Any:
    """Wrap a function of torch.npu so that it also accepts CUDA devices.

    Other values are returned unchanged.
    """
    if not isinstance(value, types.FunctionType):
        return value

    takes = inspect.signature(value).parameters

    @functools.wraps(value)
    def on_npu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and "device_name" in takes:  # two functions of torch_npu 2.13 call it so
            kwargs["device_name"] = kwargs.pop("device")
        return value(*map(_npu_for_cuda, args), **{name: _npu_for_cuda(x) for name, x in kwargs.items()})

    return on_npu


def _npu_for_cuda(value: Any) -> Any:
    if isinstance(value, str) and names_cuda(value):
        return value.replace("cuda", "npu", 1)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu") if value.index is None else torch.device("npu", value.index)
    return value
