"""Checks of the flags, group by group; what follows from a group's flags is filled in between its checks.

Each function raises ``UsageError`` with one line. ``validation.check`` calls them in order.
"""

from __future__ import annotations

from megatron_npu.errors import UsageError


def divides(divisor: int, what: str, number: int, of: str) -> None:
    """Check that ``divisor`` divides ``number``; ``what`` and ``of`` name the two in the message.

    Raises:
        UsageError: it does not.
    """
    if number % divisor:
        raise UsageError(f"{of} {number}", f"a multiple of {what} = {divisor}", "Change one of the two.")
