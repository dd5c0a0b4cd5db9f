"""What ``torch.cuda``, ``"cuda"`` and ``nccl`` mean on a device that is not CUDA.

Megatron names CUDA in some 750 lines (core 0.16.1), so patching each is hopeless; torch itself is told
once what is meant. Three rules keep the lie small: only devices of type cuda are mapped; torch's own
frames see the truth where they probe for hardware (inductor, elastic); everything is undone by ``off``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device as device_contexts
from torch.utils.data import dataloader

from megatron_npu.devices import autocast, device_arguments, gloo, hccl, version_counters
from megatron_npu.devices.base import Device
from megatron_npu.devices.cpu import CpuDevice
from megatron_npu.devices.cuda_types import TensorType, names_cuda

_FACTORIES = (
    "empty zeros ones full tensor as_tensor arange linspace logspace eye rand randn randint randperm normal "
    "empty_strided empty_permuted tril_indices triu_indices asarray scalar_tensor range from_file "
    "bartlett_window blackman_window hamming_window hann_window kaiser_window "
    "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor "
    "sparse_compressed_tensor "
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
).split()
_FACTORIES_BY_MODULE = {
    torch: _FACTORIES,
    torch.fft: ("fftfreq", "rfftfreq"),
    torch.nested: ("nested_tensor", "as_nested_tensor"),
}
_NEW = ("new_tensor", "new_empty", "new_empty_strided", "new_full", "new_zeros", "new_ones")
# Questions that torch's own modules ask to find out what hardware there is.
_PROBES = {
    "is_available",
    "device_count",
    "get_device_properties",
    "get_device_capability",
    "get_device_name",
}
# These take what is_cuda answers for a copy on the host: where the host is the device, there is none.
_OFFLOADING = "megatron.core.optimizer."
_MISSING = object()


def _caller(depth: int = 2) -> str:
    """Return the module name of the frame that called the redirected function."""
    return sys._getframe(depth).f_globals.get("__name__", "")


def _is_host(module: str) -> bool:
    """Return whether a module belongs to Megatron or to the user's script."""
    return module.startswith("megatron.") or module == "__main__"


def _means_cuda(device: Any) -> bool:
    """Return whether a device argument names a CUDA device; an index alone does."""
    if isinstance(device, str):
        return names_cuda(device)
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, torch.device) and device.type == "cuda"


class Redirection:
    """Gives torch's CUDA names the meaning of ``device``; ``off`` restores each of them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._originals: list[tuple[Any, str, Any]] = []

    def on(self) -> None:
        """Switch the redirection on; on the cuda device, and when it is on already, nothing changes."""
        if self.device.name == "cuda" or self._originals:
            return
        try:
            self._redirect_everything()
        except BaseException:
            self.off()
            raise

    def _redirect_everything(self) -> None:
        self._redirect_namespace()
        self._redirect_factories()
        self._redirect_tensors_and_modules()
        self._redirect_placement()
        self._redirect_autocast()
        self._redirect_meshes()
        self._redirect_distributed()
        if isinstance(self.device, CpuDevice):
            self._separate_generators(self.device)

    def off(self) -> None:
        """Put everything back, last change first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def _target(self, device: Any) -> Any:
        """Return the device that a CUDA device stands for, keeping its index where there is one."""
        if not _means_cuda(device):
            return device
        index = device if isinstance(device, int) else torch.device(device).index
        if self.device.name == "cpu" or index is None:
            return torch.device(self.device.name)
        return torch.device(self.device.name, index)

    # -- torch.cuda ------------------------------------------------------------------------------

    def _redirect_namespace(self) -> None:
        for path, value in self.device.cuda_namespace().items():
            *parents, name = path.split(".")
            owner = functools.reduce(getattr, parents, torch.cuda)
            if name in _PROBES:
                value = _truthful_to_torch(getattr(owner, name), value)
            self._set(owner, name, _distinct(value))

    # -- "cuda" as a device argument -------------------------------------------------------------

    def _redirect_factories(self) -> None:
        self._redirect_contexts()
        for module, names in _FACTORIES_BY_MODULE.items():
            for name in names:
                original = getattr(module, name)
                replacement = self._with_device_keyword(original)
                self._set(module, name, replacement)
                _keep_scriptable(original, replacement)
        for name in _NEW:
            self._set(torch.Tensor, name, self._with_device_keyword(getattr(torch.Tensor, name)))

    def _redirect_contexts(self) -> None:
        """Let ``with torch.device(...)`` know the factories, by torch's originals, and what cuda means."""
        device_contexts._device_constructors()  # is called once, and must not find our replacements then
        original, target = device_contexts.DeviceContext.__init__, self._target

        @functools.wraps(original)
        def initialise(self: Any, device: Any) -> None:
            original(self, target(device))

        self._set(device_contexts.DeviceContext, "__init__", initialise)

    def _with_device_keyword(self, original: Callable[..., Any]) -> Callable[..., Any]:
        target, unpinned = self._target, self.device.name == "cpu"

        @functools.wraps(original)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = target(kwargs["device"])
            if unpinned and kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False  # page-locking needs a driver; it changes speed only
            return original(*args, **kwargs)

        return factory

    def _redirect_tensors_and_modules(self) -> None:
        target, name = self._target, self.device.name
        tensor_to, module_to = torch.Tensor.to, torch.nn.Module.to
        tensor_type = torch.Tensor.type

        def to(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def move(self: Any, *args: Any, **kwargs: Any) -> Any:
                if args:
                    args = (target(args[0]), *args[1:])
                if "device" in kwargs:
                    kwargs["device"] = target(kwargs["device"])
                return original(self, *args, **kwargs)

            return move

        def cuda(original_to: Callable[..., Any]) -> Callable[..., Any]:
            def move(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
                return original_to(self, target("cuda" if device is None else device))

            return move

        def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", "torch." if name == "cpu" else f"torch.{name}.")
            elif isinstance(dtype, TensorType):
                return tensor_to(self, device=dtype.device, dtype=dtype.dtype)
            answer = tensor_type(self, dtype, *args, **kwargs)
            if isinstance(answer, str) and self.device.type == name and _is_host(_caller()):
                return "torch.cuda." + answer.rsplit(".", 1)[-1]
            return answer

        self._set(torch.Tensor, "to", to(tensor_to))
        self._set(torch.nn.Module, "to", to(module_to))
        self._set(torch.Tensor, "cuda", cuda(tensor_to))
        self._set(torch.nn.Module, "cuda", cuda(module_to))
        self._set(torch.Tensor, "type", type_)
        self._set(torch.Tensor, "is_cuda", property(self._is_device_tensor))
        if name == "cpu":
            self._set(torch.Tensor, "pin_memory", lambda self, device=None: self)
            self._set(torch.Tensor, "record_stream", lambda self, stream: None)

    def _is_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Return ``tensor.is_cuda`` as Megatron means it: it decides what is brought to the host.

        Without it, expert-parallel all-to-all takes its split sizes from a tensor on the device
        (``maybe_move_tensor_to_cpu`` of moe_utils).
        """
        kind, caller = tensor.device.type, _caller()
        if kind != self.device.name or not _is_host(caller):
            return kind == "cuda"
        return kind != "cpu" or not caller.startswith(_OFFLOADING)

    def _redirect_placement(self) -> None:
        for owner, name, value in device_arguments.replacements(self.device.name, self._target):
            self._set(owner, name, value)

    def _redirect_autocast(self) -> None:
        for owner, name, value in autocast.replacements(self.device.name):
            self._set(owner, name, value)

    def _redirect_meshes(self) -> None:
        original, name = DeviceMesh.__init__, self.device.name

        @functools.wraps(original)
        def initialise(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
            original(self, name if _means_cuda(device_type) else device_type, *args, **kwargs)

        self._set(DeviceMesh, "__init__", initialise)

    # -- torch.distributed -----------------------------------------------------------------------

    def _redirect_distributed(self) -> None:
        self._set(dist, "init_process_group", self._initialising(dist.init_process_group))
        self._set_collective("new_group", self._grouping(dist.new_group))
        for name in version_counters.UNCOUNTED:
            self._set_collective(name, version_counters.counting(getattr(dist, name)))
        if self.device.name == "npu":
            self._set_collective("all_reduce", hccl.reducing_doubles(dist.all_reduce))
        if self.device.name == "cpu":
            for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
                self._set_collective(name, gloo.regardless_of_shape(getattr(dist, name)))
            self._set_collective("isend", gloo.owning_what_is_sent(dist.isend))
            self._set(dist, "barrier", gloo.without_device_ids(dist.barrier))

    def _set_collective(self, name: str, value: Callable[..., Any]) -> None:
        """Replace a function under both names: torch's own modules use the one of ``distributed_c10d``."""
        self._set(dist, name, value)
        self._set(dist.distributed_c10d, name, value)

    def _meant(self, backend: str | None) -> str | None:
        """Return the backend, or backends by device, that Megatron's name for one means here."""
        if backend is None:
            return None
        if self.device.name == "cpu" and ("nccl" in backend or ":" in backend):
            return self.device.backend  # "cpu:gloo,cuda:nccl" names two devices; here there is one
        return backend.replace("nccl", self.device.backend).replace("cuda:", f"{self.device.name}:")

    def _translate(self, options: dict[str, Any]) -> None:
        """Give the options of a process group the meaning of this device, in place."""
        if options.get("backend") is not None:
            options["backend"] = self._meant(options["backend"])
        options.pop("pg_options", None)  # options of ProcessGroupNCCL fit no other backend
        if "device_id" in options:
            options["device_id"] = None if self.device.name == "cpu" else self._target(options["device_id"])

    def _initialising(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(*args, **kwargs).arguments
            self._translate(asked)
            gloo.finish_at_exit()
            # torch without a name would take every backend it was built with
            return original(**{**asked, "backend": asked.get("backend") or self.device.backend})

        return init_process_group

    def _grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(*args, **kwargs).arguments
            self._translate(asked)
            return original(**asked)

        return new_group

    # -- generators of the CPU ------------------------------------------------------------------

    def _separate_generators(self, device: CpuDevice) -> None:
        """Make host and device generators distinct where torch has one (see ``CpuDevice``)."""
        get, put, seed = torch.get_rng_state, torch.set_rng_state, torch.manual_seed

        @functools.wraps(get)
        def get_rng_state() -> torch.Tensor:
            return device.host_rng_state() if _caller().startswith("megatron.") else get()

        @functools.wraps(put)
        def set_rng_state(new_state: torch.Tensor) -> None:
            if _caller().startswith("megatron."):
                device.set_host_rng_state(new_state)
            else:
                put(new_state)

        @functools.wraps(seed)
        def manual_seed(value: int) -> torch.Generator:
            device.host_generator.manual_seed(value)
            return seed(value)

        for owner in (torch, torch.random):
            self._set(owner, "get_rng_state", get_rng_state)
            self._set(owner, "set_rng_state", set_rng_state)
            self._set(owner, "manual_seed", manual_seed)
        # A sampler draws at its first index, and a data set with each sample: on the host, as beside a GPU.
        for loader, name in (
            (dataloader.DataLoader, "__iter__"),
            (dataloader._BaseDataLoaderIter, "_next_index"),
            (dataloader._SingleProcessDataLoaderIter, "_next_data"),
        ):
            self._set(loader, name, _on_host(device, getattr(loader, name)))


def _on_host(device: Device, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that draws from the host's generator."""

    @functools.wraps(method)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        with device.host_rng():
            return method(*args, **kwargs)

    return on_host


def _distinct(value: Any) -> Any:
    """Return a function object of its own for a function or method, anything else as it is.

    torch._dynamo keeps its rules by function object: one function under two names of torch.cuda whose
    rules differ makes its import fail.
    """
    if isinstance(value, (types.BuiltinMethodType, types.MethodType)):
        return lambda *args, **kwargs: value(*args, **kwargs)
    if not isinstance(value, types.FunctionType):
        return value
    copy = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    return copy


def _truthful_to_torch(real: Callable[..., Any], redirected: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers torch's own modules with ``real`` and all others redirected."""

    @functools.wraps(real)
    def probe(*args: Any, **kwargs: Any) -> Any:
        asked_by_torch = _caller().partition(".")[0] in ("torch", "triton")
        return (real if asked_by_torch else redirected)(*args, **kwargs)

    return probe


def _keep_scriptable(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Let ``torch.jit.script`` recognise a replaced factory as the operator that it wraps."""
    from torch.jit import _builtins

    name = _builtins._find_builtin(original)
    if name is not None:
        _builtins._register_builtin(replacement, name)
