"""The flags that say what the data of a task are, and which of their columns and pieces are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.arg_parser import Number, Unfit, positive

_fraction = Number("a number from 0 to 0.9", float, 0.0, 0.9, metavar="X")


def _role_and_name(text: str) -> tuple[str, str]:
    role, separator, name = text.partition("=")
    if not separator or not role or not name:
        raise Unfit(text, "ROLE=NAME, such as label=stars")
    return role, name


def add_data_flags(add: Callable[..., Any]) -> None:
    """Declare what tasks read besides ``--data-path``, ``--data-name`` and ``--seq-length``."""
    add(
        "--columns",
        type=_role_and_name,
        nargs="+",
        default=[],
        metavar="ROLE=NAME",
        help="columns that have other names than usual; the roles are text, pair, label, tokens, tags, "
        "question, context, answers, source and target",
    )
    add(
        "--validation-fraction",
        type=_fraction,
        default=0.1,
        help="what is taken from the training part, where no part is there to validate on",
    )
    add("--doc-stride", type=positive, default=128, help="tokens that two windows of a context share")
    add("--max-answer-length", type=positive, default=30, help="tokens of the longest answer")
    add("--append-eod", action="store_true", help="end each text of a language model's with the end token")
    add(
        "--source-prefix",
        default="",
        metavar="TEXT",
        help="what each source begins with",
    )
    add("--max-target-length", type=positive, default=128, help="tokens of the longest output")
    add("--predict-with-generate", action="store_true", help="write targets when evaluating, too")
    add("--num-beams", type=positive, default=1, help="beams of these outputs")
