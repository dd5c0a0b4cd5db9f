"""Add this package's flags to the argument parsers of all upstreams."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from megatron_npu.base.errors import either
from megatron_npu.base.flag_names import instead_of, nearest
from megatron_npu.options import attention_flags
from megatron_npu.patching.registry import Recorder
from megatron_npu.process import launcher_report

WHY_FLAGS = "--pre-tockens, --next-tockens and --shape-order of the fused attention"


def connect_attention_flags(recorder: Recorder) -> None:
    """Record the patches that add the attention flags for a checkout with ``megatron/arguments.py``."""
    recorder.around("megatron.arguments:_add_training_args", why=WHY_FLAGS)(add_attention_flags)


def add_attention_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Add the flags of ``AttentionFlags`` after upstream's own flags."""
    parser = original(parser)
    attention_flags.add_attention_flags(parser)
    _explain_unknown_flags(parser)
    return parser


def _explain_unknown_flags(parser: argparse.ArgumentParser) -> None:
    """Make the parser suggest a replacement or similar flags in its message about an unknown flag.

    The error is printed without the list of all flags, which has hundreds of lines, and torchrun repeats it.
    """
    report = parser.error

    def error(message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        for flag in (word.partition("=")[0] for word in unknown if word.startswith("--")):
            message += _hint(flag, parser._option_string_actions)
        parser.usage = "%(prog)s [FLAG ...]; --help lists all flags"
        launcher_report.tell(f"{parser.prog}: error: {message}")
        report(message)

    parser.error = error  # type: ignore[method-assign]  # upstream creates the parser, so it has no class of ours


def _hint(flag: str, known: Collection[str]) -> str:
    """Return a hint for an unknown flag, or an empty string if no known flag is similar."""
    instead = instead_of(flag, known)
    if instead:
        return f"\nmegatron_npu: {flag}: {instead}."
    near = nearest(flag, known)
    return f"\nmegatron_npu: {flag}: did you mean {either(near)}?" if near else ""


def declaring(declare: Callable[[Callable[..., Any]], None]) -> Callable[..., argparse.ArgumentParser]:
    """Return a function, to be recorded with ``around``, that adds flags with ``declare`` after
    upstream's own flags.
    """

    def add(
        original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        parser = original(parser)
        declare(parser.add_argument)
        return parser

    return add


def accept_local_rank_with_a_dash(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Accept both ``--local_rank`` and ``--local-rank``."""
    parser = original(parser)
    parser.add_argument("--local-rank", dest="local_rank", type=int, help=argparse.SUPPRESS)
    return parser
