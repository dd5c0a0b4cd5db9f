"""Check the flags of rotary embeddings and their scaling."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import rotary_flags
from megatron_npu.pretrain.flags.checks import nothing_without

_ROPE = "--position-embedding-type rope"


def check(args: Namespace) -> None:
    """Check the flags of the rotary embedding.

    Raises:
        UsageError: a flag requires another flag, two flags are mutually exclusive, or no pair of channels is
            rotated.
    """
    if args.position_embedding_type in rotary_flags.ROTATED:
        _channels(args)
    if args.position_embedding_type == "yarn":
        _yarn(args)
    else:
        yarn = "--position-embedding-type yarn"
        nothing_without(yarn, rotary_flags.add_yarn, args, f"Add {yarn}.")
    if not args.use_rope_scaling:
        nothing_without("--use-rope-scaling", rotary_flags.add_scaling, args, "Add --use-rope-scaling.")
    _scaled(args)


def _channels(args: Namespace) -> None:
    rotated = -(-int(args.kv_channels * args.rotary_percent) // 2) * 2  # megatron-core rounds up to pairs
    if not 2 <= rotated <= args.kv_channels:
        raise UsageError(
            "--rotary-percent must rotate at least one pair of channels and at most all of them, but got "
            f"{args.rotary_percent} with --kv-channels {args.kv_channels}",
            remedy="Change one of the two.",
        )


def _yarn(args: Namespace) -> None:
    for flag, unfit, expected in (
        ("--rotary-percent", args.rotary_percent < 1, "fully rotated heads"),
        ("--rotary-base", args.rotary_base < 2, "a base above 1"),
        (
            "--rotary-interleaved",
            args.rotary_interleaved,
            "rotated halves, as in upstream's yarn implementation",
        ),
        (
            "--yarn-beta-fast",
            args.yarn_beta_fast < args.yarn_beta_slow,
            "a value of at least --yarn-beta-slow",
        ),
    ):
        if unfit:
            name = flag[2:].replace("-", "_")
            raise UsageError(
                f"{flag} {getattr(args, name)} cannot be used with --position-embedding-type yarn, which "
                f"requires {expected}",
                remedy="Change this value.",
            )


def _scaled(args: Namespace) -> None:
    given = [
        flag
        for flag, there in (
            ("--use-rope-scaling", args.use_rope_scaling),
            ("--rotary-seq-len-interpolation-factor", args.rotary_seq_len_interpolation_factor is not None),
        )
        if there
    ]
    if given and args.position_embedding_type != "rope":
        raise UsageError(
            f"{given[0]} requires {_ROPE}, which it modifies, but got --position-embedding-type "
            f"{args.position_embedding_type}",
            remedy=f"Add that flag, or remove {given[0]}.",
        )
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are mutually exclusive", remedy="Remove one of them.")
    if not args.use_rope_scaling:
        return
    if args.rope_scaling_type == rotary_flags.DYNAMIC:
        if args.kv_channels * args.rotary_percent < 4:
            raise UsageError(
                "--rope-scaling-type dynamic requires at least 4 rotated channels per head, but got "
                f"--kv-channels {args.kv_channels} and --rotary-percent {args.rotary_percent}",
                remedy="Change one of them.",
            )
    elif args.rope_scaling_low_freq_factor >= args.rope_scaling_high_freq_factor:
        raise UsageError(
            "--rope-scaling-low-freq-factor must be less than --rope-scaling-high-freq-factor "
            f"{args.rope_scaling_high_freq_factor}, but got {args.rope_scaling_low_freq_factor}",
            remedy="Change one of them.",
        )
