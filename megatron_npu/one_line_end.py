"""A user's mistake ends a process in one line, also where no command of ours has started it.

``megatron-npu`` catches these errors itself. Under torch's entry point, or ``import megatron_npu``, they come
to the interpreter's end, which would print the whole way that they have taken.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from types import TracebackType

Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]

_former: Hook | None = None


def arm(mistake: type[BaseException], *kinds: type[BaseException]) -> None:
    """Let errors of these kinds be one line where they end the process; others go to the former hook.

    Args:
        mistake: the user's; the exit code is 2, as that of our commands.
        kinds: others; the exit code stays Python's, 1.
    """
    global _former
    if _former is not None:
        return
    _former = sys.excepthook
    sys.excepthook = functools.partial(_tell, mistake, kinds, _former)


def disarm() -> None:
    """Put the former hook back."""
    global _former
    if _former is not None:
        sys.excepthook, _former = _former, None


def _tell(
    mistake: type[BaseException],
    others: tuple[type[BaseException], ...],
    former: Hook,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    if issubclass(kind, others):
        print(f"megatron_npu: error: {error}", file=sys.stderr)
    elif issubclass(kind, mistake):
        # torch.distributed's hook gathers what this one prints, and loses it where this one raises
        gathered = isinstance(sys.stderr, io.StringIO)
        print(f"megatron_npu: error: {error}", file=sys.__stderr__ if gathered else sys.stderr, flush=True)
        if not hasattr(sys, "ps1"):  # not at a prompt, which goes on
            raise SystemExit(2)
    else:
        former(kind, error, trace)
