"""Reject flags in a Megatron checkpoint that a Hugging Face family is unable to represent."""

from __future__ import annotations

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags.frozen_flags import Flags


def must_be(args: Flags, flag: str, value: object, *, name: str = "", shown: str = "") -> None:
    """Check that a flag of a checkpoint has the only value that can be converted.

    Args:
        args: the flags of the run that wrote the checkpoint.
        flag: the flag as it is written on the command line.
        value: the only value that can be converted.
        name: the flag's attribute in ``args``, if its name differs from the flag.
        shown: the text that describes the expected value in the message, if the value itself would be
            unclear.

    Raises:
        UsageError: the flag has a different value.
    """
    name = name or flag[2:].replace("-", "_")
    found = getattr(args, name)
    if found != value:
        raise UsageError(
            f"the checkpoint was trained with {flag} ({name} {found}), which cannot be converted; only "
            f"checkpoints trained {shown or f'with {name} {value}'} can. Nothing was written."
        )


def common(args: Flags) -> None:
    """Check the flags that no Hugging Face family supports.

    Raises:
        UsageError: a flag has a value that cannot be converted.
    """
    must_be(args, "--apply-layernorm-1p", False, name="layernorm_zero_centered_gamma")
    must_be(args, "--multi-latent-attention", False)
    must_be(args, "--mtp-num-layers", None)
    must_be(args, "--softmax-type", "vanilla")


def window(args: Flags) -> int | None:
    """Return the number of preceding tokens to which a query attends, or None if there is no limit.

    ``--pre-tockens`` takes precedence over megatron-core's ``--window-size``. ``--next-tockens`` has no
    effect, because the causal mask excludes later tokens.
    """
    if args.pre_tokens is not None:
        return args.pre_tokens
    before = (getattr(args, "window_size", None) or (-1, 0))[0]
    return None if before < 0 else before


def limiting_window(args: Flags) -> int | None:
    """Return the attention window if it is smaller than the sequence length, or None."""
    before = window(args)
    return None if before is None or before >= args.max_position_embeddings - 1 else before


def windows(args: Flags) -> list[bool]:
    """Return, for each layer, whether a window limits its attention."""
    if limiting_window(args) is None:
        return [False] * args.num_layers
    skipped = args.window_attn_skip_freq
    if skipped is None:
        return [True] * args.num_layers
    if isinstance(skipped, int):
        return [number % skipped != 0 for number in range(1, args.num_layers + 1)]
    return [bool(layer) for layer in skipped]


def no_window(args: Flags) -> None:
    """Check that attention is not limited by a window.

    Raises:
        UsageError: a window limits attention.
    """
    if any(windows(args)):
        before = limiting_window(args)
        raise UsageError(
            f"the checkpoint was trained with --pre-tockens {before}, which cannot be converted; only "
            "checkpoints trained without a window can. Nothing was written."
        )
