"""What happens once: initialisation, kernels that need not be built, the line before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_npu import deepspeed_device
from megatron_npu.adaptors.megatron_deepspeed.decorators import around, replace
from megatron_npu.adaptors.shared import private_files, rendezvous, start
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.adaptors.shared.start import allow_no_cuda, announce_first, load_no_kernels
from megatron_npu.errors import UsageError

around(
    "megatron.initialize:initialize_megatron",
    devices=WITHOUT_CUDA,
    why="its assertion that CUDA is available has an argument to turn it off",
)(allow_no_cuda)

around("megatron.initialize:initialize_megatron", why=private_files.WHY)(private_files.tighten_umask)


@around(
    "megatron.initialize:initialize_megatron",
    devices=("npu",),
    why="its TorchScript functions end in 'Unknown device for graph fuser' on an NPU, in the first step",
)
def refuse_npus(original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    """End before anything is built."""
    raise UsageError(
        "bigscience's Megatron-DeepSpeed on an NPU",
        "a CPU: its TorchScript functions do not run on an NPU",
        "Set MEGATRON_NPU_DEVICE=cpu, or train with Megatron-LM 285068c8, the same architecture.",
    )


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
    "megatron.training:train_step",
    why="the place to say once what was patched",
)(announce_first)


@around(
    "megatron.initialize:_initialize_distributed",
    why="DeepSpeed asks MPI who this process is unless a launcher says it, and compiles a communication over "
    "shared memory for inference at the first start on a CPU",
)
def meet(original: Callable[..., None]) -> None:
    """Tell a process that runs alone who it is; leave out what DeepSpeed would compile."""
    rendezvous.provide_address()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    deepspeed_device.compile_nothing()
    original()
