"""Patch ``megatron.checkpointing`` for safe loading, checksums, and atomic tracker files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from megatron_npu import watchdog
from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.adaptors.shared import random, resumed_schedule
from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, disks, stranger_weights
from megatron_npu.safe_files.checkpoint_values import data_only

around(
    "megatron.optimizer_param_scheduler:OptimizerParamScheduler._check_and_set",
    why=resumed_schedule.WHY,
)(resumed_schedule.refuse_in_one_line)


@around(
    "megatron.checkpointing:_load_base_checkpoint",
    why="current torch.load rejects argparse.Namespace and numpy's RNG state, and upstream then exits with "
    "code 0; torch.load up to 2.5 executes any code in the file",
)
def load_data_only(original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint's tensors, numbers and arguments without executing code from it.

    An invalid file raises a one-line error.
    """
    from megatron.model import enums

    with data_only(load_dir, enums.ModelType):
        return original(load_dir, *args, **kwargs)


around("megatron.checkpointing:_load_base_checkpoint", why=random.OTHER_DEVICE)(random.with_own_generators)


@around(
    "megatron.checkpointing:load_checkpoint",
    why="without the optimizer's state upstream refreshes its fp32 weights for fp16 only: with bf16 the "
    "first step puts the initial weights back",
    upstream_bug=True,
    until="upstream refreshes them with --bf16 too (fixed by megatron-core 0.12); 285068c8 is frozen",
)
def refresh_main_weights(
    original: Callable[..., int], model: Any, optimizer: Any, *rest: Any, **kwargs: Any
) -> int:
    """Copy the loaded weights to the fp32 main weights with ``--bf16``, as upstream does with ``--fp16``."""
    from megatron import get_args

    iteration = original(model, optimizer, *rest, **kwargs)
    args = get_args()
    released = of_scripts.is_release(_directory(*rest, **kwargs)[1])
    without_state = args.finetune or args.no_load_optim or released
    if args.bf16 and optimizer is not None and without_state:
        optimizer.reload_model_params()
    return iteration


@around(
    "megatron.checkpointing:load_checkpoint",
    why="a task or the text server whose --load contains no checkpoint continues with random weights, and "
    "reports its results with exit code 0",
    upstream_bug=True,
    until="upstream has --exit-on-missing-checkpoint (since megatron-core 0.12); 285068c8 is frozen",
)
def require_what_is_evaluated(
    original: Callable[..., int], model: Any, optimizer: Any, *rest: Any, **kwargs: Any
) -> int:
    """Raise an error if an evaluation has no checkpoint to evaluate.

    Training, which has an optimizer, may start without one.
    """
    load_arg, directory = _directory(*rest, **kwargs)
    if optimizer is None and not Path(directory, of_scripts.TRACKER).is_file():
        raise UsageError(
            f"--{load_arg.replace('_', '-')} must be a folder that a training run wrote with --save, but "
            f"{directory} contains no checkpoint (it has no {of_scripts.TRACKER}). Correct the path, "
            "because without weights there is nothing to evaluate."
        )
    return original(model, optimizer, *rest, **kwargs)


def _directory(
    opt_param_scheduler: Any = None, load_arg: str = "load", strict: bool = True
) -> tuple[str, str]:
    """Return the name and the value of the flag that specifies the checkpoint folder.

    Args:
        opt_param_scheduler, load_arg, strict: the arguments of ``load_checkpoint`` after the first two.
    """
    from megatron import get_args

    return load_arg, getattr(get_args(), load_arg)


around("megatron.arguments:_add_checkpointing_args", why=of_scripts.WHY_FLAGS)(of_scripts.add_flags)
# The iteration that --load-last-good has chosen, while load_checkpoint runs.
_CHOSEN: ContextVar[int | None] = ContextVar("selects the iteration to load", default=None)


@around("megatron.checkpointing:load_checkpoint", why=of_scripts.WHY)
@watchdog.phase("loading")
def compare_checksums(
    original: Callable[..., int], model: Any, optimizer: Any, *rest: Any, **kwargs: Any
) -> int:
    """Verify the checksums of the checkpoint that is about to be loaded.

    If the flag is given, use an older valid one instead.
    """
    from megatron import get_args

    args = get_args()
    _, root = _directory(*rest, **kwargs)
    chosen = checksums.newest_whole(root) if getattr(args, "load_last_good", False) else None
    place = of_scripts.to_load(root, chosen)
    of_scripts.require_same(root, place)
    token = _CHOSEN.set(chosen)
    try:
        with (
            disks.whole(place),
            of_scripts.verifying(place if getattr(args, "verify_checkpoint", True) else None),
        ):
            iteration = original(model, optimizer, *rest, **kwargs)
    finally:
        _CHOSEN.reset(token)
    if place is not None:
        stranger_weights.tell_of_loaded(place, model)
    return iteration


@around(
    "megatron.checkpointing:read_metadata",
    why="--load-last-good: this tree has no --ckpt-step; only the tracker selects the checkpoint to load",
)
def name_the_chosen(original: Callable[..., tuple[int, bool]], tracker_filename: str) -> tuple[int, bool]:
    """Return the selected iteration, and False because the checkpoint is not a release."""
    chosen = _CHOSEN.get()
    return original(tracker_filename) if chosen is None else (chosen, False)


around(
    "megatron.checkpointing:get_checkpoint_tracker_filename",
    why="upstream rewrites the tracker in place: if killed meanwhile, it leaves an empty tracker",
    upstream_bug=True,
    until="never: 285068c8 is frozen (0.16 still writes it in place)",
)(of_scripts.tracker_to_write)


@around(
    "megatron.checkpointing:save_checkpoint",
    why="files get mode 640, folders mode 750, and checksums, and the tracker appears atomically; upstream "
    "saves the last iteration twice, the second time over the files that the tracker names",
)
@watchdog.phase(watchdog.SAVING)
def save_privately(original: Callable[..., None], iteration: int, *args: Any, **kwargs: Any) -> None:
    """Save a checkpoint in private files, and write their checksums.

    The tracker is renamed once all files are written.
    """
    from megatron import get_args

    given = get_args()
    if given.save is None:
        return original(iteration, *args, **kwargs)
    place = of_scripts.folder(given.save, iteration)
    mask = files.tighten_umask()
    try:
        verifies = getattr(given, "verify_checkpoint", True)
        with of_scripts.saving(given.save, place, verifies=verifies), whole_files():
            original(iteration, *args, **kwargs)
    finally:
        os.umask(mask)


@contextlib.contextmanager
def whole_files() -> Iterator[None]:
    """Make ``torch.save`` replace a file only after the new file is complete.

    If the disk is full, the old file is kept.
    """
    save: Callable[..., None] = torch.save

    def save_whole(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, str | os.PathLike):
            with files.writing(Path(file)) as stream:
                save(value, stream, *args, **kwargs)
        else:
            save(value, file, *args, **kwargs)

    torch.save = save_whole  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save = save
