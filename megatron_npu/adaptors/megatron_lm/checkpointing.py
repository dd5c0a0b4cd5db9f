"""``megatron.checkpointing``: reading without running code, checksums, no half-written trackers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_npu import checksums, files, safe_load
from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.adaptors.shared.checkpoint_values import harmless
from megatron_npu.errors import UsageError

_TRACKER_FILE = "latest_checkpointed_iteration.txt"


@around(
    "megatron.checkpointing:_load_base_checkpoint",
    why="torch.load of today refuses argparse.Namespace and numpy's RNG state, and upstream then ends the "
    "process with exit code 0; torch.load of 2.5 and before runs whatever code the file holds",
)
def load_data_only(original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any) -> Any:
    """Read tensors, numbers and arguments, nothing that runs; say what is wrong with a bad file."""
    with safe_load.allowing(*_harmless()), safe_load.weights_only():
        try:
            return original(load_dir, *args, **kwargs)
        except SystemExit as stop:
            # upstream: print_rank_0(error); sys.exit()
            cause = stop.__context__
            raise UsageError(
                f"the checkpoint in {load_dir} cannot be read ({type(cause).__name__}: {_first(cause)})",
                "a checkpoint of Megatron-LM that holds tensors and arguments only",
                "Check that its files are complete; never load one from a source that you do not trust.",
            ) from cause


def _first(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]


def _harmless() -> list[Any]:
    """Return what a checkpoint of this tree holds besides tensors: arguments, enums, numpy's RNG state."""
    from megatron.model import enums

    return [enums.ModelType, *harmless()]


@around(
    "megatron.checkpointing:load_checkpoint",
    why="without the optimizer's state upstream refreshes its fp32 weights for fp16 only: with bf16 the "
    "first step puts the initial weights back",
    upstream_bug=True,
    until="upstream refreshes them with --bf16, too (by megatron-core 0.12); 285068c8 is frozen",
)
def refresh_main_weights(
    original: Callable[..., int],
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
) -> int:
    """Copy the loaded weights to the optimizer's fp32 ones with ``--bf16``, as upstream with ``--fp16``."""
    from megatron import get_args

    iteration = original(model, optimizer, opt_param_scheduler, load_arg=load_arg, strict=strict)
    args = get_args()
    without_state = args.finetune or args.no_load_optim or _is_release(getattr(args, load_arg))
    if args.bf16 and optimizer is not None and without_state:
        optimizer.reload_model_params()
    return iteration


@around(
    "megatron.checkpointing:load_checkpoint",
    why="a task or the text server whose --load holds no checkpoint goes on with random weights, and its "
    "figures end with exit code 0",
    upstream_bug=True,
    until="upstream has --exit-on-missing-checkpoint (by megatron-core 0.12); 285068c8 is frozen",
)
def require_what_is_evaluated(
    original: Callable[..., int],
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
) -> int:
    """Refuse to evaluate a model that was never loaded; a training may begin so, and has an optimizer."""
    from megatron import get_args

    directory = getattr(get_args(), load_arg)
    if optimizer is None and not Path(directory, _TRACKER_FILE).is_file():
        raise UsageError(
            f"--{load_arg.replace('_', '-')} {directory}: no checkpoint there (no {_TRACKER_FILE})",
            "a folder that a training wrote with --save",
            "Correct the path; without weights there is nothing to evaluate.",
        )
    return original(model, optimizer, opt_param_scheduler, load_arg=load_arg, strict=strict)


around("megatron.arguments:_add_checkpointing_args", why=of_scripts.WHY_FLAGS)(of_scripts.add_flags)
_chosen: int | None = None  # by --load-last-good, while load_checkpoint runs


@around("megatron.checkpointing:load_checkpoint", why=of_scripts.WHY)
def compare_checksums(
    original: Callable[..., int],
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
) -> int:
    """Compare the files of the checkpoint with their checksums first, another one's if the flag says so."""
    global _chosen
    from megatron import get_args

    args = get_args()
    root = getattr(args, load_arg)
    try:
        if getattr(args, "load_last_good", False):
            _chosen = checksums.newest_whole(root)
        place = of_scripts.folder(root, _chosen) if _chosen else of_scripts.of_tracker(root)
        if place is not None and getattr(args, "verify_checkpoint", True):
            of_scripts.verify(place)
        return original(model, optimizer, opt_param_scheduler, load_arg=load_arg, strict=strict)
    finally:
        _chosen = None


@around(
    "megatron.checkpointing:read_metadata",
    why="--load-last-good: this tree has no --ckpt-step, the tracker alone says which checkpoint is loaded",
)
def name_the_chosen(original: Callable[..., tuple[int, bool]], tracker_filename: str) -> tuple[int, bool]:
    """Return the iteration that was chosen, and that it is no release."""
    return original(tracker_filename) if _chosen is None else (_chosen, False)


def _is_release(directory: str) -> bool:
    tracker = Path(directory, _TRACKER_FILE)
    return tracker.is_file() and tracker.read_text().strip() == "release"


_saving = False  # while upstream's save_checkpoint runs, the tracker is written under another name


@around(
    "megatron.checkpointing:get_checkpoint_tracker_filename",
    why="upstream opens the tracker for writing in place: killed then, it leaves an empty one",
    upstream_bug=True,
    until="285068c8 is frozen: for ever (0.16 still writes it in place)",
)
def name_unfinished_tracker(original: Callable[..., str], checkpoints_path: str) -> str:
    """Return the name to write to while a checkpoint is being saved."""
    name = original(checkpoints_path)
    return str(files.partial_file(Path(name))) if _saving else name


@around(
    "megatron.checkpointing:save_checkpoint",
    why="files are to be 640, folders 750, to have checksums, and the tracker to appear at once",
)
def save_privately(original: Callable[..., None], iteration: int, *args: Any, **kwargs: Any) -> None:
    """Save private files; write their checksums, and rename the tracker when all is written."""
    global _saving
    from megatron import get_args

    tracker = Path(get_args().save, _TRACKER_FILE)
    place = of_scripts.folder(get_args().save, iteration)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank == 0:
        files.remove_abandoned(tracker)  # of runs that were killed while they saved
    of_scripts.begin_save(place)
    mask, _saving = files.tighten_umask(), True
    try:
        original(iteration, *args, **kwargs)
        if getattr(get_args(), "verify_checkpoint", True):
            of_scripts.write(place)
    finally:
        _saving = False
        os.umask(mask)
    if rank == 0:
        files.partial_file(tracker).replace(tracker)
