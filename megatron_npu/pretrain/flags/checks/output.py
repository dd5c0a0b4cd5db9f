"""Checks of a run's inputs and outputs: logs, checkpoints, and their folders."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.pretrain.checkpoint import (
    checkpoint_compatibility,
    checkpoint_files,
    stock_checkpoints,
    whole_checkpoints,
)
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo
from megatron_npu.pretrain.flags import derive, job_flags
from megatron_npu.pretrain.flags.checks import nothing_without
from megatron_npu.web.address import require_packages


def logging(args: Namespace) -> None:
    """Check that the packages for logging are installed, and that the log has a destination.

    Raises:
        UsageError: a package or the destination is missing.
    """
    sinks(args)
    wandb(args)
    ends(args)
    if args.dashboard is not None:
        if not (args.json_log or args.save or args.tensorboard_dir):
            raise UsageError(
                "--dashboard",
                "--save, --tensorboard-dir or --json-log, which the dashboard reads",
                "Add one.",
            )
        require_packages("--dashboard")


def sinks(args: Namespace) -> None:
    """Check that TensorBoard and the plotting package are installed; set whether each is used.

    Raises:
        UsageError: a package is not installed, or the plot has no destination.
    """
    if args.tensorboard_dir and not is_installed("tensorboard"):
        raise UsageError(
            "--tensorboard-dir, but tensorboard is not installed", "tensorboard", "pip install tensorboard"
        )
    if args.plot and not derive.has_matplotlib():
        raise UsageError("--plot, but matplotlib is not installed", "matplotlib", "pip install matplotlib")
    if args.plot and not (args.save or args.tensorboard_dir):
        raise UsageError("--plot", "--save or --tensorboard-dir, where the plot is written", "Add one.")
    derive.plot(args)


def wandb(args: Namespace) -> None:
    """Check that Weights & Biases is installed, and that its files have a destination.

    Raises:
        UsageError: the package or the destination is missing, or a W&B flag is given without the project.
    """
    if not args.wandb_project:
        nothing_without("--wandb-project", job_flags.add_wandb, args, "both", "Add it.")
        return
    if not is_installed("wandb"):
        raise UsageError(
            f"--wandb-project {args.wandb_project}, but wandb is not installed", "wandb", "pip install wandb"
        )
    if not (args.wandb_save_dir or args.save):
        raise UsageError(
            "--wandb-project", "--save or --wandb-save-dir, where its files are written", "Add one."
        )


def ends(args: Namespace) -> None:
    """Check that --exit-signal is given together with --exit-signal-handler.

    Raises:
        UsageError: --exit-signal-handler is missing.
    """
    if args.exit_signal != "SIGTERM" and not args.exit_signal_handler:
        raise UsageError(
            f"--exit-signal {args.exit_signal}", "--exit-signal-handler with it", "Add --exit-signal-handler."
        )


def checkpoints(args: Namespace) -> None:
    """Find the checkpoint to resume from; check that it fits, and that no other checkpoint is overwritten.

    Raises:
        UsageError: the checkpoint does not exist or contains another model, or ``--save`` has checkpoints of
            another run.
    """
    if args.save_interval and not args.save:
        raise UsageError("--save-interval", "--save DIR with it", "Add --save.")
    if args.save_per_machine and not args.save:
        raise UsageError("--save-per-machine", "--save DIR with it", "Add --save.")
    _retention(args)
    if args.async_save and args.fully_sharded:
        raise UsageError(
            "--async-save with weights that are sharded (zero-2, zero-3, fsdp)",
            "synchronous checkpoints, the only kind that such a run supports",
            "Remove --async-save.",
        )
    _rewinding(args)
    _require_load(args)
    if args.load_last_good:
        _choose_whole(args)
    found = _find_checkpoint(args)
    derive.beginning(args, None if found is None else found.path)
    if found is not None:
        _go_on_from(args, found)
    _spare(args, found)


def _require_load(args: Namespace) -> None:
    for flag, given in (
        ("--ckpt-step", args.ckpt_step is not None),
        ("--load-last-good", args.load_last_good),
    ):
        if given and not args.load:
            raise UsageError(flag, "--load DIR with it", "Add --load.")


def _go_on_from(args: Namespace, found: CheckpointInfo) -> None:
    """Check that a checkpoint fits the run, and set the values that are derived from it."""
    if not found.is_own:
        found = _of_stock_script(args, found)
    checkpoint_compatibility.require_same_model(found, args)
    derive.loaded(args, has_optimizer=found.has_optimizer, has_rng=found.has_rng)
    checkpoint_compatibility.require_readable_shards(found, args)
    if args.load_optim:
        checkpoint_compatibility.require_loadable_optimizer(found, args)
    if not args.finetune:
        derive.iterations_from(args, found.iteration, found.consumed_train_samples)


def _retention(args: Namespace) -> None:
    """Check that checkpoints are saved, and that the retain interval is a multiple of the save interval.

    Raises:
        UsageError: a retention flag lacks ``--save-interval``, or the intervals do not match.
    """
    for flag, value in (
        ("--save-keep-last", args.save_keep_last),
        ("--save-retain-interval", args.save_retain_interval),
    ):
        if value and not args.save_interval:
            raise UsageError(f"{flag} {value}", "--save DIR --save-interval N with it", "Add them.")
    if args.save_retain_interval and args.save_retain_interval % args.save_interval:
        raise UsageError(
            f"--save-retain-interval {args.save_retain_interval}",
            f"a multiple of --save-interval {args.save_interval}",
            "Change one of the two.",
        )


def _rewinding(args: Namespace) -> None:
    """Check that there will be checkpoints to which --loss-spike-policy rewind can return.

    Raises:
        UsageError: there will be no checkpoints, or none with the complete state.
    """
    if args.loss_spike_policy != "rewind":
        return
    if not args.save_interval:
        raise UsageError(
            "--loss-spike-policy rewind",
            "--save DIR --save-interval N, for checkpoints to return to",
            "Add them, or pass --loss-spike-policy skip.",
        )
    for flag, left_out in (("--no-save-optim", args.no_save_optim), ("--no-save-rng", args.no_save_rng)):
        if left_out:
            raise UsageError(
                f"--loss-spike-policy rewind {flag}",
                "checkpoints with the complete state of a run",
                f"Remove {flag}.",
            )


def _choose_whole(args: Namespace) -> None:
    """Set ``--ckpt-step`` to the newest undamaged checkpoint, and print which later ones are damaged.

    Raises:
        UsageError: there are checkpoints, but all are damaged; or ``--ckpt-step`` is given too.
    """
    if args.ckpt_step is not None:
        raise UsageError(
            f"--ckpt-step {args.ckpt_step} --load-last-good", "only one of them", "Remove one of them."
        )
    there = checkpoint_files.iterations(args.load)
    derive.last_good(args, whole_checkpoints.newest_whole(args.load))
    if there and args.ckpt_step is None:
        raise UsageError(
            f"--load {args.load} --load-last-good: none of {len(there)} checkpoints is valid",
            "at least one whose files match their checksums",
            f"Run `megatron-npu checkpoint verify {args.load}` to see the problem of each.",
        )
    passed = [number for number in there if number > (args.ckpt_step or 0)]
    if passed and args.rank == 0:
        print(
            f" {args.load}: damaged and skipped: iterations {', '.join(map(str, passed))}; loading "
            f"{args.ckpt_step}",
            flush=True,
        )


def _find_checkpoint(args: Namespace) -> CheckpointInfo | None:
    if not args.load:
        return None
    found = stock_checkpoints.find(args.load, args.ckpt_step)
    if found is None and not same_directory(args.load, args.save):
        raise UsageError(
            f"--load {args.load}: no checkpoint there",
            f"a directory with {checkpoint_files.TRACKER}",
            "Correct the path, or remove --load to start from scratch.",
        )
    return found


def _of_stock_script(args: Namespace, found: CheckpointInfo) -> CheckpointInfo:
    """Return a checkpoint of Megatron-LM's own scripts with this run's vocabulary size, after checking it.

    Raises:
        UsageError: the vocabulary is too large, or no flag allows resuming without the optimizer state.
    """
    stock_checkpoints.require_vocabulary(found, args)
    if found.path.name != checkpoint_files.RELEASE and not (args.finetune or args.no_load_optim):
        raise UsageError(
            f"--load {found.path} was saved by a script of Megatron-LM, whose optimizer state cannot "
            "be loaded",
            "--finetune, or --no-load-optim",
            "--finetune loads the weights and starts at iteration 0; --no-load-optim resumes from "
            f"iteration {found.iteration} with a fresh optimizer state.",
        )
    same = {"tokenizer_vocab_size": args.tokenizer_vocab_size}
    return replace(found, arguments=found.arguments | same)


def same_directory(one: str | None, other: str | None) -> bool:
    """Return whether both paths name the same folder; a missing path names none."""
    return bool(one and other) and Path(one or "").resolve() == Path(other or "").resolve()


def _spare(args: Namespace, found: CheckpointInfo | None) -> None:
    """Check that saving does not overwrite another run's checkpoints."""
    if not args.save:
        return
    _require_directory(args.save)
    goes_on = found is not None and same_directory(args.save, args.load) and not args.finetune
    if not goes_on and (Path(args.save) / checkpoint_files.TRACKER).exists():
        raise UsageError(
            f"--save {args.save} already contains checkpoints",
            "an empty directory, or the one that this run resumes from",
            f"Add --load {args.save} to resume, or use another directory.",
        )
    if goes_on and args.ckpt_step is not None and not args.load_last_good:
        _spare_later(args)


def _require_directory(save: str) -> None:
    if Path(save).exists() and not Path(save).is_dir():
        raise UsageError(f"--save {save} is a file", "a directory", "Use another path.")


def _spare_later(args: Namespace) -> None:
    """Check that a run that resumes from ``--ckpt-step`` overwrites no later iteration."""
    later = [number for number in checkpoint_files.iterations(args.save) if number > args.ckpt_step]
    if later:
        raise UsageError(
            (
                f"--save {args.save} contains checkpoints of later iterations than --ckpt-step "
                f"{args.ckpt_step}: "
            )
            + ", ".join(map(str, later)),
            "a directory where the run overwrites no other checkpoint",
            "Use another --save, or move them away.",
        )


def places(args: Namespace) -> None:
    """Check at the start that files written later, possibly after hours of training, can be written.

    Raises:
        UsageError: a directory is a file, or is not writable.
    """
    if args.rank:  # on other machines there may be no such places, and only the first process writes to all
        return
    for flag, place in (
        ("--save", args.save),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--wandb-save-dir", getattr(args, "wandb_save_dir", None)),  # `train` has none
        ("--data-cache-path", args.data_cache_path),
    ):
        if place:
            _require_no_address(flag, place)
            _require_writable(flag, Path(place).absolute())
    if args.json_log:
        _require_appendable("--json-log", Path(args.json_log).absolute())


def _require_no_address(flag: str, place: str) -> None:
    """Reject a URL of an object storage: a local folder with that name would be created instead."""
    if "://" in place:
        raise UsageError(
            f"{flag} {place}",
            "a directory in a file system; addresses are not supported",
            "Mount the storage, or save to a disk and copy complete checkpoints.",
        )


def _require_writable(flag: str, place: Path) -> None:
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{flag}: {there} is a file", "a directory", "Use another path.")
    if reason := files.refusal(there):
        raise UsageError(
            f"{flag}: {there} cannot be written ({reason})",
            "a directory with write permission",
            "Use another path.",
        )


def _require_appendable(flag: str, file: Path) -> None:
    if file.is_dir():
        raise UsageError(f"{flag}: {file} is a directory", "a file", "Use another path.")
    if not file.exists():
        _require_writable(flag, file.parent)
    if not file.is_file():  # to be made; or a device or a pipe, which an attempt could hold up
        return
    try:
        open(file, "ab", opener=files.own_opener).close()
    except OSError as error:
        raise UsageError(
            f"{flag}: {file} cannot be written ({error.strerror})",
            "a file with write permission",
            "Use another path.",
        ) from None
