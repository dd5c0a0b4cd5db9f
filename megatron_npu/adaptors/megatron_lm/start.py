"""What happens once: initialisation, kernels that need not be built, the line before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import around, replace
from megatron_npu.adaptors.shared import private_files, rendezvous, start
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.adaptors.shared.start import allow_no_cuda, announce_first, load_no_kernels

around(
    "megatron.initialize:initialize_megatron",
    devices=WITHOUT_CUDA,
    why="its assertion that CUDA is available has an argument to turn it off",
)(allow_no_cuda)

around("megatron.initialize:initialize_megatron", why=private_files.WHY)(private_files.tighten_umask)


@around("megatron.initialize:initialize_megatron", why=start.WHY_WATCHED)
def watch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let the watchdog watch the ranks."""
    from megatron.global_vars import get_args

    return start.watch(get_args, original, *args, **kwargs)


replace(
    "megatron.fused_kernels:load",
    why="it compiles CUDA kernels with nvcc, inside the checkout; every one of them has an operation here",
)(load_no_kernels)

around(
    "megatron.schedules:get_forward_backward_func",
    why="asked for before each step: the place to say once what was patched",
)(announce_first)


@around(
    "megatron.initialize:_initialize_distributed",
    why="init_process_group asks for MASTER_ADDR and MASTER_PORT, which only a launcher sets",
)
def meet_oneself(original: Callable[..., None]) -> None:
    """Give a process that runs alone an address to meet at."""
    rendezvous.provide_address()
    original()


@replace(
    "megatron.initialize:set_jit_fusion_options",
    why="it switches TorchScript's own fusers off in favour of nvfuser, which torch 2.2 removed, and warms "
    "up functions that are operations here",
)
def set_jit_fusion_options() -> None:
    """Leave torch's defaults."""
