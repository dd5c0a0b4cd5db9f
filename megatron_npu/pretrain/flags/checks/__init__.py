"""Check the flags of the built-in trainer, one group after another.

Derived values are set between the groups.

Each function raises ``UsageError`` with a one-line message. ``validation.check`` calls them in order.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError


def divides(divisor: int, what: str, number: int, of: str, remedy: str = "Change one of the two.") -> None:
    """Check that ``number`` is divisible by ``divisor``.

    ``what`` and ``of`` name the two numbers in the error message.

    Raises:
        UsageError: ``number`` is not divisible by ``divisor``.
    """
    if number % divisor:
        raise UsageError(f"{of} must be a multiple of {what} = {divisor}, but got {number}", remedy=remedy)


def nothing_without(
    first: str, add: Callable[[Callable[..., Any]], None], args: Namespace, remedy: str
) -> None:
    """Check that no flag of a group is given without the flag ``first``, on which all of them depend.

    Args:
        first: the flag that is not given.
        add: adds the flags of the group to a parser.
        args: the run's flags.
        remedy: an instruction that fixes the problem.

    Raises:
        UsageError: a flag of the group is given.
    """
    parser = Parser("")
    add(parser.add_argument)
    for action in parser._actions:
        if action.dest != "help" and getattr(args, action.dest) != action.default:
            raise UsageError(f"{action.option_strings[0]} requires {first}", remedy=remedy)
