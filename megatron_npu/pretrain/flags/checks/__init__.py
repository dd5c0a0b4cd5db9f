"""Checks of the flags by group; derived values are filled in between.

Each function raises ``UsageError`` with one line. ``validation.check`` calls them in order.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError


def divides(divisor: int, what: str, number: int, of: str) -> None:
    """Check that ``divisor`` divides ``number``; ``what`` and ``of`` name the two in the message.

    Raises:
        UsageError: it does not.
    """
    if number % divisor:
        raise UsageError(f"{of} {number}", f"a multiple of {what} = {divisor}", "Change one of the two.")


def nothing_without(
    first: str, add: Callable[[Callable[..., Any]], None], args: Namespace, expected: str, remedy: str
) -> None:
    """Check that no flag of a group is given whose flags mean something together with ``first`` alone.

    Args:
        first: the flag, which is not given.
        add: adds the group's flags to a parser.
        args: of the run.
        expected, remedy: for the message.

    Raises:
        UsageError: one of them is given.
    """
    parser = Parser("")
    add(parser.add_argument)
    for action in parser._actions:
        if action.dest != "help" and getattr(args, action.dest) != action.default:
            raise UsageError(f"{action.option_strings[0]} without {first}", expected, remedy)
