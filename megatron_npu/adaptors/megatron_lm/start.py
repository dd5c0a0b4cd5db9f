"""What happens once, before the first step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from megatron_npu.adaptors.megatron_lm.decorators import WITHOUT_CUDA, constant, replace, wrap
from megatron_npu.adaptors.shared import rendezvous
from megatron_npu.patching import banner


@wrap(
    "megatron.initialize:initialize_megatron",
    devices=WITHOUT_CUDA,
    why="its assertion that CUDA is available has an argument to turn it off",
)
def allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call it with ``allow_no_cuda=True``."""

    @functools.wraps(original)
    def initialize_megatron(
        extra_args_provider: Any = None,
        args_defaults: Any = None,
        ignore_unknown_args: bool = False,
        allow_no_cuda: bool = False,
    ) -> Any:
        return original(extra_args_provider, args_defaults or {}, ignore_unknown_args, allow_no_cuda=True)

    return initialize_megatron


@wrap(
    "megatron.initialize:_initialize_distributed",
    why="init_process_group asks for MASTER_ADDR and MASTER_PORT, which only a launcher sets",
)
def meet_oneself(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give a process that runs alone an address to meet at."""

    @functools.wraps(original)
    def _initialize_distributed() -> None:
        rendezvous.provide_address()
        original()

    return _initialize_distributed


@replace(
    "megatron.initialize:set_jit_fusion_options",
    why="it switches TorchScript's own fusers off in favour of nvfuser, which torch 2.2 removed, and warms "
    "up functions that are operations here",
)
def set_jit_fusion_options() -> None:
    """Leave torch's defaults."""


@replace(
    "megatron.fused_kernels:load",
    why="it compiles CUDA kernels with nvcc, inside the checkout; every one of them has an operation here",
)
def load(args: Any) -> None:
    """Build nothing."""


@wrap(
    "megatron.schedules:get_forward_backward_func",
    why="asked for before each step: the place to say once what was patched",
)
def announce_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Print the ledger's one line on rank 0 before the first step."""

    @functools.wraps(original)
    def get_forward_backward_func() -> Any:
        banner.before_step()
        return original()

    return get_forward_backward_func


class HostDistributedDataParallel(DistributedDataParallel):
    """torch's DDP without ``device_ids``, which it refuses for a module in upstream memory."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)


constant(
    "megatron.training:torchDDP",
    HostDistributedDataParallel,
    devices=("cpu",),
    why="--DDP-impl torch passes device_ids, which torch refuses for modules on the cpu",
)
