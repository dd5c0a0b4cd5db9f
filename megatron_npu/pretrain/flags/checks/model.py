"""Check the flags of the model: sizes, positions, precision, attention and recomputation."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError
from megatron_npu.options import memory_flags
from megatron_npu.options.attention_flags import DEFAULTS, AttentionFlags
from megatron_npu.pretrain.flags import derive
from megatron_npu.pretrain.flags.checks import divides, rotary


def check(args: Namespace) -> None:
    """Check the flags for the model's sizes, positions and precision.

    Raises:
        UsageError: these are inconsistent.
    """
    if args.kv_channels is None:
        divides(args.num_attention_heads, "--num-attention-heads", args.hidden_size, "--hidden-size")
    if args.group_query_attention:
        divides(
            args.num_query_groups,
            "--num-query-groups",
            args.num_attention_heads,
            "the number of attention heads",
        )
    derive.model(args)
    if args.seq_length > args.max_position_embeddings:
        raise UsageError(
            f"--seq-length must be at most --max-position-embeddings {args.max_position_embeddings}, but "
            f"got {args.seq_length}",
            remedy="Shorten the sequence or raise the number of positions.",
        )
    if args.bf16 and args.fp16:
        raise UsageError("--bf16 and --fp16 are mutually exclusive", remedy="Remove one of them.")
    rotary.check(args)
    windows(args)
    if args.cross_entropy_fusion_impl == "linear" and not args.cross_entropy_loss_fusion:
        raise UsageError(
            "--cross-entropy-fusion-impl linear requires --cross-entropy-loss-fusion; without it, Megatron "
            "ignores --cross-entropy-fusion-impl",
            remedy="Add --cross-entropy-loss-fusion.",
        )


def windows(args: Namespace) -> None:
    """Check that ``--window-attn-skip-freq`` is given together with a window and has one value per layer.

    Raises:
        UsageError: the window or values are missing.
    """
    skipped = args.window_attn_skip_freq
    if skipped is None:
        return
    if AttentionFlags.from_args(args).window == (None, None):
        raise UsageError("--window-attn-skip-freq requires --pre-tockens", remedy="Add --pre-tockens N.")
    if args.mtp_num_layers is not None:
        raise UsageError(
            "--window-attn-skip-freq and --mtp-num-layers are mutually exclusive, because the pattern "
            "does not cover the multi-token prediction layers",
            remedy="Remove one of them.",
        )
    if isinstance(skipped, list) and len(skipped) != args.num_layers:
        raise UsageError(
            f"--window-attn-skip-freq must list {args.num_layers} layers (--num-layers), but it lists "
            f"{len(skipped)}",
            remedy="Change the list.",
        )


def attention(args: Namespace) -> None:
    """Check that the selected attention implementation supports the other attention flags.

    Raises:
        UsageError: Megatron's own attention is selected, which supports neither windows nor layouts.
    """
    if args.attention_backend in ("unfused", "local") and AttentionFlags.from_args(args) != DEFAULTS:
        *others, last = AttentionFlags.spellings()
        raise UsageError(
            f"{', '.join(others)} and {last} require a fused attention backend, but got "
            f"--attention-backend {args.attention_backend}",
            remedy="Remove --attention-backend.",
        )


def recompute(args: Namespace) -> None:
    """Check the flags for recomputing and for offloading activations.

    Raises:
        UsageError: a flag requires other flags.
    """
    derive.recompute(args)
    if args.recompute_granularity == "full" and None in (args.recompute_method, args.recompute_num_layers):
        raise UsageError(
            "--recompute-granularity full requires --recompute-method and --recompute-num-layers",
            remedy="Add the missing flag.",
        )
    if args.recompute_granularity != "full" and args.recompute_method is not None:
        raise UsageError(
            "--recompute-method requires --recompute-granularity full",
            remedy="Add --recompute-granularity full, or remove --recompute-method.",
        )
    since_0_16 = tuple(map(int, args.megatron_version.split(".")[:2])) >= (0, 16)
    more = memory_flags.OFFLOADED_OF_EXPERTS if since_0_16 and args.num_experts else ()
    memory_flags.check_activation_offloading(args, (*memory_flags.OFFLOADED, *more))
