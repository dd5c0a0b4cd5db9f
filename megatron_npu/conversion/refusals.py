"""Flags of a Megatron checkpoint that a family of Hugging Face has no word for."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.errors import UsageError


def must_be(args: Namespace, flag: str, value: object, *, name: str = "", shown: str = "") -> None:
    """Check a flag of the checkpoint.

    Args:
        args: the flags of the run that wrote the checkpoint.
        flag: its spelling on the command line.
        value: the only value that can be converted.
        name: its attribute, where that is not the flag's spelling.
        shown: what to say is expected, where the value does not say it.

    Raises:
        UsageError: it has another value.
    """
    name = name or flag[2:].replace("-", "_")
    found = getattr(args, name, value)  # absent: the checkpoint is older than the flag
    if found != value:
        raise UsageError(
            f"the checkpoint was trained with {flag} ({name} {found}), which cannot be converted",
            shown or f"{name} {value}",
            "Nothing was written.",
        )


def common(args: Namespace) -> None:
    """Check what no family of Hugging Face has.

    Raises:
        UsageError: a flag has a value that cannot be converted.
    """
    must_be(args, "--qk-layernorm", False)
    must_be(args, "--apply-layernorm-1p", False, name="layernorm_zero_centered_gamma")
    # a limit that no token reaches is none; --next-tockens only allows what the causal mask forbids
    if args.pre_tokens is not None and args.pre_tokens < args.max_position_embeddings - 1:
        must_be(args, "--pre-tockens", None, name="pre_tokens", shown="no window")
