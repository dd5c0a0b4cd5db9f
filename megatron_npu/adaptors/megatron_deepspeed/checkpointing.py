"""``megatron.checkpointing``: checkpoints, also of DeepSpeed's engine, read without running code."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import Any

from megatron_npu import deepspeed_device, files, safe_load
from megatron_npu.adaptors.megatron_deepspeed.decorators import around
from megatron_npu.adaptors.shared.checkpoint_values import harmless
from megatron_npu.errors import UsageError


@around(
    "megatron.checkpointing:load_checkpoint",
    why="torch.load of today refuses argparse.Namespace, and upstream then ends the process with exit code "
    "0; DeepSpeed's engine, and torch.load of 2.5 and before, run whatever code the file holds",
)
def load_data_only(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Read tensors, numbers and arguments, nothing that runs; say what is wrong with a bad file."""
    from megatron import enums, get_args

    kinds = [kind for kind in vars(enums).values() if isinstance(kind, enum.EnumMeta)]
    with (
        safe_load.allowing(*harmless(), *kinds, *deepspeed_device.harmless()),
        safe_load.weights_only(),
    ):
        try:
            return original(*args, **kwargs)
        except SystemExit as stop:  # upstream: print_rank_0(error); sys.exit()
            cause = stop.__context__
            reason = str(cause).strip().partition("\n")[0]
            raise UsageError(
                f"the checkpoint in {get_args().load} cannot be read ({type(cause).__name__}: {reason})",
                "a checkpoint of Megatron-DeepSpeed that holds tensors and arguments only",
                "Check that its files are complete; never load one from a source that you do not trust.",
            ) from cause


@around("megatron.checkpointing:save_checkpoint", why="files are to be 640, folders 750")
def save_privately(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save private files."""
    mask = files.tighten_umask()
    try:
        original(*args, **kwargs)
    finally:
        os.umask(mask)
