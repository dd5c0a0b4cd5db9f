"""Checks of the optimizer's flags and of its schedules."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.errors import UsageError
from megatron_npu.training import derive


def check(args: Namespace) -> None:
    """Check the learning rate, its schedule and that of the weight decay.

    Raises:
        UsageError: they do not fit together.
    """
    derive.optimizer(args)
    _learning_rate(args)
    derive.schedule(args)
    _schedule(args)
    _weight_decay(args)
    derive.weight_decay(args)
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UsageError(
            "both --override- and --use-checkpoint-opt_param-scheduler", "one of them", "Drop one."
        )


def _learning_rate(args: Namespace) -> None:
    if args.lr is None:
        raise UsageError("no --lr", "the highest learning rate", "Give one, for example --lr 1e-3.")
    if not 0 <= args.min_lr <= args.lr:
        raise UsageError(f"--min-lr {args.min_lr}", f"from 0 to --lr {args.lr}", "Change one of the two.")
    if not 0 <= args.lr_warmup_init <= args.lr:
        raise UsageError(f"--lr-warmup-init {args.lr_warmup_init}", f"from 0 to --lr {args.lr}", "Change it.")


def _schedule(args: Namespace) -> None:
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters:
            raise UsageError("--lr-warmup-fraction and --lr-warmup-iters", "one of them", "Drop one.")
        if not 0 <= args.lr_warmup_fraction < 1:
            raise UsageError(
                f"--lr-warmup-fraction {args.lr_warmup_fraction}", "from 0 to below 1", "Change it."
            )
    elif args.lr_warmup_iters >= args.lr_decay_iters:
        raise UsageError(
            f"--lr-warmup-iters {args.lr_warmup_iters}",
            f"less than the {args.lr_decay_iters} iterations of the decay",
            "Lower it, or raise --lr-decay-iters or --train-iters.",
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise UsageError("--lr-decay-style WSD", "--lr-wsd-decay-iters together with it", "Add it.")


def _weight_decay(args: Namespace) -> None:
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise UsageError(
                "--start-weight-decay or --end-weight-decay",
                "--weight-decay-incr-style linear or cosine together with them",
                "Add it, or give --weight-decay alone.",
            )
    elif start is None or end is None or not 0 <= start <= end:
        raise UsageError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} from {start} to {end}",
            "--start-weight-decay from 0 to --end-weight-decay",
            "Give both.",
        )
