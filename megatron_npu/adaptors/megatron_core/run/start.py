"""Patch the start of a training run: initialization, process groups, dataset helpers and signals.

Patches ``megatron.training.initialize``, ``megatron.training.models.dist_utils``,
``megatron.training.dist_signal_handler``, ``megatron.legacy.fused_kernels``, and ``parallel_state``,
``datasets.utils`` and ``ssm.ops.gdp.common`` of ``megatron.core``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, WITHOUT_CUDA, around, replace
from megatron_npu.adaptors.shared import private_files, rendezvous, start


@around(
    "megatron.training.initialize:initialize_megatron",
    devices=WITHOUT_CUDA,
    why="upstream asserts that CUDA is available unless an argument turns the check off",
)
def allow_no_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``initialize_megatron`` with ``allow_no_cuda=True``."""
    return start.allow_no_cuda(original, *args, **kwargs)


@around(
    "megatron.training.initialize:initialize_megatron",
    why="init_process_group needs MASTER_ADDR and MASTER_PORT, which only a launcher sets",
)
def meet_oneself(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Set a rendezvous address for a process that was started without a launcher."""
    rendezvous.provide_address()
    return original(*args, **kwargs)


around("megatron.training.initialize:initialize_megatron", why=private_files.WHY)(private_files.tighten_umask)


@around("megatron.training.initialize:initialize_megatron", why=start.WHY_WATCHED)
def watch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start the watchdog that monitors the ranks."""
    from megatron.training.global_vars import get_args

    return start.watch(get_args, original, *args, **kwargs)


replace(
    "megatron.legacy.fused_kernels:load",
    versions="<0.17",
    why=(
        "upstream compiles CUDA kernels with nvcc, which nothing uses here; without the toolkit, the "
        "compilation raises a TypeError"
    ),
)(start.load_no_kernels)

replace(
    "megatron.core.datasets.utils:compile_helpers",
    why=(
        "upstream runs make inside the checkout, for the first python3-config on the path, and exits if "
        "that fails; helpers_cpp is already compiled, or a stub"
    ),
)(start.compile_no_helpers)


@replace(
    "megatron.training.dist_signal_handler:get_device",
    devices=WITHOUT_CUDA,
    why=(
        "upstream supports only nccl and gloo: any other backend, including HCCL, raises a RuntimeError "
        "without a message"
    ),
)
def get_device(local_rank: int | None = None) -> torch.device:
    """Return the device of this process, on which its backend gathers tensors."""
    return devices.current().torch_device()


@around(
    "megatron.training.models.dist_utils:_wrap_with_mp_wrapper",
    versions=">=0.18",
    upstream_bug=True,
    until=NOT_FIXED,
    why="the builders of 0.18 (hybrid models) and 0.19 (also GPT) leave a model that was initialized with "
    "--use-cpu-initialization on the host, where the device cannot use it",
)
def move_to_the_device(
    original: Callable[..., Any], model_list: list[Any], transformer_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Move a model that was built on the host to the device before it is wrapped, as the scripts of 0.17 do.

    This includes torch's FSDP2, which in 0.17 took the model from the host: for a short time, all of it is on
    the device.
    """
    if transformer_config.use_cpu_initialization and not transformer_config.init_model_with_meta_device:
        for part in model_list:
            part.to(devices.current().torch_device())
    return original(model_list, transformer_config, *args, **kwargs)


@replace(
    "megatron.core.ssm.ops.gdp.common:check_shared_mem",
    versions=">=0.20",
    devices=WITHOUT_CUDA,
    why=(
        "megatron.training always imports this module, which queries the first device's shared memory at "
        "import: every rank initializes the first NPU, and none can fork after that"
    ),
)
def small_blocks(arch: str = "none") -> bool:
    """Return False, which is upstream's result if its query fails.

    The block size matters only for CUDA kernels.
    """
    return False
