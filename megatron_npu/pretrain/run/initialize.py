"""Set up the process groups, the device and the seeds at the start of a run, and tear them down at its
end.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_npu import devices, plugin, watchdog
from megatron_npu.ops.compiled import building
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.run import step_graph


def silence_known_warnings() -> None:
    """Silence known warnings of megatron-core that users cannot act on."""
    # each module says what it falls back from (the plug-in brings it), and one warns of its own default
    known = ".*(Transformer Engine|Apex).* not installed|full scope is deprecated"
    warnings.filterwarnings("ignore", message=known, module=r"megatron\.core")
    # its checkpoints use what torch will drop some day
    for module in (r"megatron\.core\.dist_checkpointing", r"torch\.distributed"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)


@contextlib.contextmanager
def session(args: Flags) -> Iterator[None]:
    """Set up a run inside the ``with`` block: bug fixes, process groups, the current device and the seeds.

    Args:
        args: the result of ``validation.check``, or the flags stored in a checkpoint, because some callers
            have no plan.
    """
    from megatron.core import parallel_state

    # Megatron relies on the order in which kernels are queued; one hardware queue keeps it (cuda only)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    watchdog.end_with_launcher()
    plugin.cure_numbers()
    devices.current().set_current(args.local_rank)
    building.prepare()
    joined = dist.is_initialized()  # a caller's own group is left as it is
    if not joined:
        _init_process_group(args.world_size, timedelta(minutes=args.distributed_timeout_minutes))
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
        )
        seed_everything(args.seed)
        with step_graph.on_its_stream(args.cuda_graph_impl != "none"), watchdog.watching():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        if not joined:
            dist.destroy_process_group()


@contextlib.contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside the ``with`` block if ``asked`` is True.

    Two environment variables are set if they are unset: cuBLAS is deterministic only with a fixed workspace
    (otherwise torch raises an error), and NCCL's order of summation depends on its algorithm.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _init_process_group(world_size: int, timeout: timedelta) -> None:
    """Create the process group of all ranks.

    A single process needs no address.

    Raises:
        UsageError: torchrun has restarted the run with a stale store, so that the processes cannot connect,
            or the limit of open files is too low.
    """
    backend = devices.current().backend
    watchdog.require_open_files(world_size)
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        watchdog.require_fresh_store()
        with watchdog.meeting():
            dist.init_process_group(backend, timeout=timeout)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, the generators of the host and the device, and Megatron's RNG tracker.

    Each pipeline stage uses a different seed, as in Megatron.
    """
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def random_numbers_of_device(flags: Flags) -> str:
    """Return a log line if the run uses random numbers that a CPU run would not reproduce, otherwise an empty
    string.

    A device's generator gives other numbers than a CPU's for the same seed, so that two runs that differ in
    nothing else begin with different losses.
    """
    device = devices.current()
    if device.is_host:
        return ""
    names = [] if flags.use_cpu_initialization else ["initial weights"]
    if flags.hidden_dropout or flags.attention_dropout:
        names.append("dropout")
    if not names:
        return ""
    advice = "" if flags.use_cpu_initialization else "; --use-cpu-initialization draws the weights on the CPU"
    verb = "is" if names == ["dropout"] else "are"
    return (
        f" {' and '.join(names)} {verb} drawn by the {device.name}'s random generator, so losses differ from "
        f"those of a CPU run with the same --seed{advice}"
    )
