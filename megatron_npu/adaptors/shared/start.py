"""Implement start-up code that the stock scripts of both Megatrons share."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_npu import watchdog
from megatron_npu.adaptors.shared import addresses, private_files
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.checkpoint_files import disks, folder_lock, shared_folder
from megatron_npu.ops.compiled import building
from megatron_npu.patching import banner
from megatron_npu.patching.registry import Recorder
from megatron_npu.process import launchers

WHY_WATCHED = (
    "if a rank dies or hangs, the others report 'Connection reset by peer', or nothing for a long time"
)


def allow_no_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``initialize_megatron`` with ``allow_no_cuda=True``, regardless of the value in the script."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["allow_no_cuda"] = True
    return original(*given.args, **given.kwargs)


def watch(get_args: Callable[[], Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``initialize_megatron``, compile our kernels, and start to monitor the connected ranks.

    From this call until the process ends, rank 0 holds a lock on ``--save``.

    Args:
        get_args: upstream's function.

    Raises:
        UsageError: torchrun has restarted the run in a way that prevents the ranks from connecting, the limit
            on open files is too low for the ranks, another run writes into ``--save``, or not all ranks see
            the same folder there.
    """
    launchers.settle(("run", sys.argv[0]))
    watchdog.end_with_launcher()
    watchdog.require_fresh_store()
    watchdog.require_open_files(int(os.environ.get("WORLD_SIZE", "1")))
    with watchdog.meeting():
        result = original(*args, **kwargs)
    building.prepare()  # flags are read, and no step has begun
    watchdog.begin(lambda: getattr(get_args(), "curr_iteration", -1) + 1)  # upstream's counts from 0
    addresses.require_supported(get_args())
    _hold_save_folder(get_args())
    return result


def _hold_save_folder(args: Any) -> None:
    # a script that initialises twice holds the first one
    if not args.save or addresses.is_address(args.save):
        return
    folder, per_machine = Path(args.save), getattr(args, "save_per_machine", False)
    if per_machine and dist.is_initialized():
        disks.save_into(folder)
    parts = disks.several()
    if args.rank == (0 if parts is None else parts.first) and not folder_lock.held():
        with contextlib.suppress(OSError):  # upstream says at its first save that there can be no such folder
            folder_lock.hold(folder)
    if not per_machine:
        shared_folder.require("--save", folder, shared_folder.PER_MACHINE)


def connect_old_tree(recorder: Recorder) -> None:
    """Record the patches that checkouts with ``megatron/initialize.py`` need at start-up.

    The functions in these files are similar across the trees.

    Args:
        recorder: the checkout's recorder.
    """
    recorder.around(
        "megatron.initialize:initialize_megatron",
        devices=WITHOUT_CUDA,
        why="upstream asserts that CUDA is available unless an argument turns the check off",
    )(allow_no_cuda)
    recorder.around("megatron.initialize:initialize_megatron", why=private_files.WHY)(
        private_files.tighten_umask
    )
    recorder.around("megatron.initialize:initialize_megatron", why=WHY_WATCHED)(_watch_old_tree)
    recorder.replace(
        "megatron.fused_kernels:load",
        why=(
            "upstream compiles CUDA kernels with nvcc inside the checkout; each of them has an operation here"
        ),
    )(load_no_kernels)


def _watch_old_tree(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.global_vars import get_args

    return watch(get_args, original, *args, **kwargs)


def announce_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Print the one-line summary of the ledger on rank 0 before the first step."""
    banner.before_step()
    return original(*args, **kwargs)


def keep_fusers(recorder: Recorder) -> None:
    """Record a patch that keeps torch's default settings for TorchScript's fusers."""
    recorder.replace(
        "megatron.initialize:set_jit_fusion_options",
        why="it turns off TorchScript's own fusers in favor of nvfuser, which torch 2.2 removed, and warms "
        "up functions that are operations here",
    )(set_jit_fusion_options)


def set_jit_fusion_options() -> None:
    """Do nothing, so that TorchScript keeps torch's default settings."""


def load_no_kernels(args: Any) -> None:
    """Do nothing in place of loading CUDA kernels.

    This replaces ``fused_kernels.load``, which compiles CUDA kernels inside the checkout.
    """


def compile_no_helpers() -> None:
    """Do nothing in place of compiling dataset helpers.

    This replaces the function that compiles the dataset helpers inside the checkout.
    """
