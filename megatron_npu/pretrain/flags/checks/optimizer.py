"""Check the flags of the optimizer and of its schedules."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError
from megatron_npu.options import memory_flags
from megatron_npu.pretrain.flags import derive, muon_flags
from megatron_npu.pretrain.flags.checks import nothing_without


def check(args: Namespace) -> None:
    """Check the flags of the learning rate, and the schedules of the learning rate and the weight decay.

    Raises:
        UsageError: these are inconsistent.
    """
    derive.optimizer(args)
    if args.optimizer == "muon":
        _muon(args)
    else:
        nothing_without("--optimizer muon", muon_flags.add, args, "Add --optimizer muon.")
    _narrow(args)
    memory_flags.check_swap_optimizer(args)
    _learning_rate(args)
    _one_unit(args)
    derive.schedule(args)
    _schedule(args)
    _weight_decay(args)
    derive.weight_decay(args)
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UsageError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler are mutually exclusive",
            remedy="Remove one of them.",
        )


def _muon(args: Namespace) -> None:
    """Reject flags that megatron-core's Muon does not support, and installations without Muon."""
    version = tuple(map(int, args.megatron_version.split(".")[:2]))
    if version < muon_flags.SINCE:
        raise UsageError(
            f"--optimizer muon cannot be used with megatron-core {args.megatron_version}, which has no Muon; "
            "it requires 0.16 or later",
            remedy="Pass --optimizer adam.",
        )
    if version < muon_flags.COEFFICIENTS_SINCE and args.muon_coefficient_type != "quintic":
        raise UsageError(
            f"--muon-coefficient-type must be quintic with megatron-core {args.megatron_version}, because "
            f"versions before 0.17 have no other type, but got {args.muon_coefficient_type}",
            remedy="Remove --muon-coefficient-type.",
        )
    if not muon_flags.installed():
        raise UsageError(
            f"--optimizer muon requires the package {muon_flags.PACKAGE}, which provides Muon for "
            "megatron-core, but it is not installed",
            remedy=f"Install it: pip install --no-deps --ignore-requires-python {muon_flags.PACKAGE}==0.3.0.",
        )
    for what, given in (
        ("fp16", args.fp16),
        ("a distributed optimizer", args.use_distributed_optimizer),
        ("sharded weights", args.fully_sharded),
        ("--overlap-grad-reduce", args.overlap_grad_reduce),
    ):
        if given:
            raise UsageError(
                f"--optimizer muon cannot be used with {what}; it requires fp32 or bf16, with whole "
                "matrices on every data-parallel rank",
                remedy="Remove one of them.",
            )


def _refuse_types_alone(args: Namespace) -> None:
    for what in memory_flags.NARROW:
        value = getattr(args, f"{what}_dtype")
        if value != "fp32":
            raise UsageError(
                f"--{what.replace('_', '-')}-dtype {value} requires --use-precision-aware-optimizer",
                remedy="Add --use-precision-aware-optimizer.",
            )


def _narrow(args: Namespace) -> None:
    """Check the flags of the precision-aware optimizer.

    Its dtypes have an effect only if it is enabled.
    """
    memory_flags.check_precision_aware_optimizer(args)
    derive.precision_aware_optimizer(args)
    asked = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    if not asked:
        _refuse_types_alone(args)
        return
    if args.optimizer != "adam" or args.fully_sharded:
        raise UsageError(
            "--use-precision-aware-optimizer and --reuse-fp32-param require Adam with the distributed "
            f"optimizer, but got {'FSDP' if args.fully_sharded else f'--optimizer {args.optimizer}'}",
            remedy="Remove one of them.",
        )
    if args.main_grads_dtype == "bf16" and not (args.bf16 and not args.accumulate_allreduce_grads_in_fp32):
        raise UsageError(
            "--main-grads-dtype bf16 requires gradients that are accumulated in bf16: --bf16 without "
            "--accumulate-allreduce-grads-in-fp32",
            remedy="Change one of these flags.",
        )


def _learning_rate(args: Namespace) -> None:
    if args.lr is None:
        raise UsageError(
            "--lr is required, because it sets the peak learning rate",
            remedy="Pass it, for example --lr 1e-3.",
        )
    if not 0 <= args.min_lr <= args.lr:
        raise UsageError(
            f"--min-lr must be from 0 to --lr {args.lr}, but got {args.min_lr}",
            remedy="Change one of the two flags.",
        )
    if not 0 <= args.lr_warmup_init <= args.lr:
        raise UsageError(
            f"--lr-warmup-init must be from 0 to --lr {args.lr}, but got {args.lr_warmup_init}",
            remedy="Change this value.",
        )


def _one_unit(args: Namespace) -> None:
    """Check that the schedule and the length of the run use the same unit, iterations or samples.

    Megatron has the same requirement.

    Raises:
        UsageError: the units differ.
    """
    iterations, samples = (
        [f"--lr-{part}-{unit}" for part in ("decay", "warmup", "wsd-decay")] for unit in ("iters", "samples")
    )
    by_samples = args.train_samples is not None
    foreign = next((flag for flag in (iterations if by_samples else samples) if _given(args, flag)), None)
    if foreign:
        own = foreign.replace("iters", "samples") if by_samples else foreign.replace("samples", "iters")
        raise UsageError(
            f"{foreign} cannot be used {('with' if by_samples else 'without')} --train-samples, because "
            "the schedule must count in the same units as the run",
            remedy=f"Pass {own}.",
        )


def _given(args: Namespace, flag: str) -> bool:
    return bool(getattr(args, flag.removeprefix("--").replace("-", "_")))


def _schedule(args: Namespace) -> None:
    unit = "iters" if args.train_samples is None else "samples"
    warmup, decay = getattr(args, f"lr_warmup_{unit}"), getattr(args, f"lr_decay_{unit}")
    if args.lr_warmup_fraction is not None:
        if warmup:
            raise UsageError(
                f"--lr-warmup-fraction and --lr-warmup-{unit} are mutually exclusive",
                remedy="Remove one of them.",
            )
        if not 0 <= args.lr_warmup_fraction < 1:
            raise UsageError(
                "--lr-warmup-fraction must be a fraction of at least 0 and less than 1, but got "
                f"{args.lr_warmup_fraction}",
                remedy="Change this value.",
            )
    elif warmup >= decay:
        raise UsageError(
            f"--lr-warmup-{unit} must be less than the {decay} "
            f"{('iterations' if unit == 'iters' else unit)} of the decay, but got {warmup}",
            remedy=f"Lower it, raise --lr-decay-{unit}, or train longer.",
        )
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise UsageError(
            f"--lr-decay-style WSD requires --lr-wsd-decay-{unit}", remedy=f"Add --lr-wsd-decay-{unit} N."
        )


def _weight_decay(args: Namespace) -> None:
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise UsageError(
                "--start-weight-decay and --end-weight-decay require --weight-decay-incr-style linear or "
                "cosine, but the weight decay is constant",
                remedy="Add it, or pass only --weight-decay.",
            )
    elif start is None or end is None or not 0 <= start <= end:
        raise UsageError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} requires a --start-weight-decay of "
            f"at least 0 and at most --end-weight-decay, but got {start} and {end}",
            remedy="Pass both.",
        )
