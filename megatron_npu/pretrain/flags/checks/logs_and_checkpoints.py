"""Check the inputs and outputs of a run: logs, checkpoints, and their folders."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.checkpoint_files import object_storage
from megatron_npu.pretrain.checkpoint import (
    checkpoint_compatibility,
    checkpoint_files,
    stock_checkpoints,
    whole_checkpoints,
)
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo
from megatron_npu.pretrain.flags import derive, job_flags
from megatron_npu.pretrain.flags.checkpoint_parts import ResumeFlags
from megatron_npu.pretrain.flags.checks import nothing_without
from megatron_npu.pretrain.report import json_lines
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
                "--dashboard requires a folder or file to read: --save, --tensorboard-dir or --json-log",
                remedy="Add one of them.",
            )
        require_packages("--dashboard")


def sinks(args: Namespace) -> None:
    """Check that TensorBoard and the plotting package are installed, and record which of them is used.

    Raises:
        UsageError: a package is not installed, or the plot has no destination.
    """
    if args.tensorboard_dir and not is_installed("tensorboard"):
        raise UsageError(
            "--tensorboard-dir requires the tensorboard package, which is not installed",
            remedy="Install it: pip install tensorboard.",
        )
    if args.plot and not derive.has_matplotlib():
        raise UsageError(
            "--plot requires the matplotlib package, which is not installed",
            remedy="Install it: pip install matplotlib.",
        )
    if args.plot and not (args.save or args.tensorboard_dir):
        raise UsageError(
            "--plot requires a folder to write to: --save or --tensorboard-dir", remedy="Add one of them."
        )
    derive.plot(args)


def wandb(args: Namespace) -> None:
    """Check that Weights & Biases is installed, and that its files have a destination.

    Raises:
        UsageError: the package or the destination is missing, or a W&B flag is given without the project.
    """
    if not args.wandb_project:
        nothing_without("--wandb-project", job_flags.add_wandb, args, "Add --wandb-project.")
        return
    if not is_installed("wandb"):
        raise UsageError(
            f"--wandb-project {args.wandb_project} requires the wandb package, which is not installed",
            remedy="Install it: pip install wandb.",
        )
    if not (args.wandb_save_dir or args.save):
        raise UsageError(
            "--wandb-project requires a folder for its files: --save or --wandb-save-dir",
            remedy="Add one of them.",
        )


def ends(args: Namespace) -> None:
    """Check that --exit-signal is given together with --exit-signal-handler.

    Raises:
        UsageError: --exit-signal-handler is missing.
    """
    if args.exit_signal != "SIGTERM" and not args.exit_signal_handler:
        raise UsageError(
            f"--exit-signal {args.exit_signal} requires --exit-signal-handler",
            remedy="Add --exit-signal-handler.",
        )


def checkpoints(args: Namespace) -> None:
    """Find the checkpoint to resume from, and check that the run can resume from it.

    Also check that saving overwrites no other checkpoint.

    Raises:
        UsageError: the checkpoint does not exist or contains another model, or ``--save`` contains
            checkpoints of another run.
    """
    if args.save_interval and not args.save:
        raise UsageError("--save-interval requires --save", remedy="Add --save DIR.")
    if args.save_per_machine and not args.save:
        raise UsageError("--save-per-machine requires --save", remedy="Add --save DIR.")
    _retention(args)
    if args.async_save and args.fully_sharded:
        raise UsageError(
            "--async-save cannot be used with sharded weights (zero-2, zero-3, fsdp), for which only "
            "synchronous checkpoints are supported",
            remedy="Remove --async-save.",
        )
    _rewinding(args)
    _require_load(args)
    fetched(args, args.ckpt_step)
    if args.load_last_good:
        _choose_whole(args)
    found = _find_checkpoint(args)
    derive.beginning(args, None if found is None else found.path)
    if found is not None:
        _go_on_from(args, found)
    _spare(args, found)


def fetched(args: Namespace, step: int | None = None) -> None:
    """Download the checkpoint to resume from to the ``--load`` folder, if ``--object-storage`` is given.

    Raises:
        UsageError: there is neither ``--save`` nor ``--load``, or the storage cannot be read.
    """
    if not args.object_storage:
        return
    if not (args.save or args.load):
        raise UsageError("--object-storage requires --save or --load", remedy="Add --save DIR --load DIR.")
    object_storage.opened(args.object_storage)
    if args.load:
        object_storage.fetch(args.object_storage, args.load, step)


def _require_load(args: Namespace) -> None:
    for flag, given in (
        ("--ckpt-step", args.ckpt_step is not None),
        ("--load-last-good", args.load_last_good),
    ):
        if given and not args.load:
            raise UsageError(f"{flag} requires --load", remedy="Add --load DIR.")


def _go_on_from(args: Namespace, found: CheckpointInfo) -> None:
    """Check that the run can resume from a checkpoint, and set the values that depend on the checkpoint."""
    if not found.is_own:
        found = _of_stock_script(args, found)
    checkpoint_compatibility.require_same_model(found, vars(args))
    derive.loaded(args, has_optimizer=found.has_optimizer, has_rng=found.has_rng)
    flags = ResumeFlags.of(args)
    checkpoint_compatibility.require_readable_shards(found, flags)
    if flags.load_optim:
        checkpoint_compatibility.require_loadable_optimizer(found, flags)
    if not args.finetune:
        derive.iterations_from(args, found.iteration, found.consumed_train_samples)


def _retention(args: Namespace) -> None:
    """Check that the run saves checkpoints, and that the retain interval is a multiple of the save interval.

    Raises:
        UsageError: a retention flag lacks ``--save-interval``, or the intervals do not match.
    """
    for flag, value in (
        ("--save-keep-last", args.save_keep_last),
        ("--save-retain-interval", args.save_retain_interval),
    ):
        if value and not args.save_interval:
            raise UsageError(
                f"{flag} {value} requires --save and --save-interval",
                remedy="Add --save DIR --save-interval N.",
            )
    if args.save_retain_interval and args.save_retain_interval % args.save_interval:
        raise UsageError(
            f"--save-retain-interval must be a multiple of --save-interval {args.save_interval}, but got "
            f"{args.save_retain_interval}",
            remedy="Change one of the two.",
        )


def _rewinding(args: Namespace) -> None:
    """Check that --loss-spike-policy rewind will find checkpoints to which it can rewind.

    Raises:
        UsageError: there will be no checkpoints, or no checkpoints with the complete state.
    """
    if args.loss_spike_policy != "rewind":
        return
    if not args.save_interval:
        raise UsageError(
            "--loss-spike-policy rewind requires --save DIR and --save-interval N, so that there are "
            "checkpoints to return to",
            remedy="Add them, or pass --loss-spike-policy skip.",
        )
    for flag, left_out in (("--no-save-optim", args.no_save_optim), ("--no-save-rng", args.no_save_rng)):
        if left_out:
            raise UsageError(
                f"--loss-spike-policy rewind cannot be used with {flag}, because it requires checkpoints "
                "with the complete state of a run",
                remedy=f"Remove {flag}.",
            )


def _choose_whole(args: Namespace) -> None:
    """Set ``--ckpt-step`` to the newest undamaged checkpoint, and print the later checkpoints, which are
    damaged.

    Raises:
        UsageError: there are checkpoints, but all are damaged; or ``--ckpt-step`` is given too.
    """
    if args.ckpt_step is not None:
        raise UsageError(
            f"--ckpt-step {args.ckpt_step} and --load-last-good are mutually exclusive",
            remedy="Remove one of them.",
        )
    there = checkpoint_files.iterations(args.load)
    derive.last_good(args, whole_checkpoints.newest_whole(args.load))
    if there and args.ckpt_step is None:
        raise UsageError(
            f"--load {args.load} --load-last-good: none of the {len(there)} checkpoints has files that "
            "match their checksums",
            remedy=f"Run `megatron-npu checkpoint verify {args.load}` to see the problem of each.",
        )
    passed = [number for number in there if number > (args.ckpt_step or 0)]
    if passed and args.rank == 0:
        print(
            f" {args.load}: skipping the damaged checkpoints of iterations "
            f"{', '.join(map(str, passed))}; loading {args.ckpt_step}",
            flush=True,
        )


def _find_checkpoint(args: Namespace) -> CheckpointInfo | None:
    if not args.load:
        return None
    found = stock_checkpoints.find(args.load, args.ckpt_step)
    if found is None and not same_directory(args.load, args.save):
        raise UsageError(
            f"--load {args.load} contains no checkpoint; it must be a directory with the file "
            f"{checkpoint_files.TRACKER}",
            remedy=f"{checkpoint_files.right_folder(args.load)}, or remove --load to start from scratch.",
        )
    return found


def _of_stock_script(args: Namespace, found: CheckpointInfo) -> CheckpointInfo:
    """Check a stock script's checkpoint, and return it with this run's vocabulary size.

    Raises:
        UsageError: the vocabulary is too large, or no flag allows resuming without the optimizer state.
    """
    stock_checkpoints.require_vocabulary(found, args.tokenizer_vocab_size)
    if found.path.name != checkpoint_files.RELEASE and not (args.finetune or args.no_load_optim):
        raise UsageError(
            f"--load {found.path} was saved by a Megatron-LM script, whose optimizer state cannot be "
            "loaded; it requires --finetune or --no-load-optim",
            remedy="--finetune loads the weights and starts at iteration 0; --no-load-optim resumes "
            f"from iteration {found.iteration} with a fresh optimizer state.",
        )
    same = {"tokenizer_vocab_size": args.tokenizer_vocab_size}
    return replace(found, arguments=found.arguments | same)


def same_directory(one: str | None, other: str | None) -> bool:
    """Return True if both paths are given and refer to the same folder."""
    return bool(one and other) and Path(one or "").resolve() == Path(other or "").resolve()


def _spare(args: Namespace, found: CheckpointInfo | None) -> None:
    """Check that saving will not overwrite another run's checkpoints."""
    if not args.save:
        return
    _require_directory(args.save)
    _require_text(args)
    goes_on = found is not None and same_directory(args.save, args.load) and not args.finetune
    if not goes_on and (Path(args.save) / checkpoint_files.TRACKER).exists():
        raise UsageError(
            f"--save {args.save} already contains checkpoints; it must be an empty directory, or the one "
            "that this run resumes from",
            remedy=f"Add --load {args.save} to resume, or use another directory.",
        )
    if goes_on and args.ckpt_step is not None and not args.load_last_good:
        _spare_later(args)


def _require_text(args: Namespace) -> None:
    """Check that ``config.yaml``, which stores all flags, can represent them."""
    for name, value in vars(args).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and any("\ud800" <= letter <= "\udfff" for letter in each):
                raise UsageError(
                    f"--{name.replace('_', '-')} {each!a} must be UTF-8, because --save stores all flags in "
                    "config.yaml",
                    remedy="Rename the file or folder.",
                )


def _require_directory(save: str) -> None:
    if Path(save).exists() and not Path(save).is_dir():
        raise UsageError(f"--save {save} must be a directory, but is a file", remedy="Use another path.")


def _spare_later(args: Namespace) -> None:
    """Check that a run that resumes from ``--ckpt-step`` will not overwrite a later iteration."""
    later = [number for number in checkpoint_files.iterations(args.save) if number > args.ckpt_step]
    if later:
        raise UsageError(
            f"--save {args.save} contains checkpoints of later iterations than --ckpt-step "
            f"{args.ckpt_step}, which the run would overwrite: {', '.join(map(str, later))}",
            remedy="Use another --save, or move the checkpoints away.",
        )


def places(args: Namespace) -> None:
    """Check at startup that all output files are writable.

    Some are first written after hours of training.

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
    """Reject an object-storage URL where only a local folder is supported.

    A local folder with the URL as its name would be created otherwise.
    """
    if "://" in place:
        raise UsageError(
            f"{flag} must be a directory in a file system, because URLs are not supported, but got {place}",
            remedy=f"Save to a disk, and add --object-storage {place} to copy complete checkpoints there."
            if flag == "--save"
            else "Use a directory, or mount the storage.",
        )


def _require_writable(flag: str, place: Path) -> None:
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{flag} requires a directory, but {there} is a file", remedy="Use another path.")
    if reason := files.refusal(there):
        raise UsageError(
            f"{flag} requires a directory with write permission, but {there} cannot be written ({reason})",
            remedy="Use another path.",
        )


def _require_appendable(flag: str, file: Path) -> None:
    if file.is_dir():
        raise UsageError(f"{flag} requires a file, but {file} is a directory", remedy="Use another path.")
    if not file.exists():
        _require_writable(flag, file.parent)
    if not file.is_file():  # to be made; or a device or a pipe, which an attempt could hold up
        return
    try:
        open(file, "ab", opener=files.own_opener).close()
    except OSError as error:
        raise UsageError(
            f"{flag} requires a file with write permission, but {file} cannot be written ({error.strerror})",
            remedy="Use another path.",
        ) from None
    json_lines.require_log(flag, file)
