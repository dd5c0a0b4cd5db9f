"""A user's mistake ends a process in one line, also where no command of ours has started it.

``megatron-npu`` catches these errors itself. Under torch's entry point, or ``import megatron_npu``, they come
to the interpreter's end, which would print the whole way that they have taken.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import TracebackType

from megatron_npu.process import launcher_report

Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def arm(
    mistake: type[BaseException],
    *kinds: type[BaseException],
    traced: Callable[[BaseException], bool] = lambda error: False,
) -> OneLineEnd:
    """Let errors of these kinds be one line where they end the process; others go to the former hook.

    A second call changes nothing.

    Args:
        mistake: the user's; the exit code is 2, as that of our commands.
        kinds: others; the exit code stays Python's, 1.
        traced: of which errors the user needs the traceback, and gets it.

    Returns:
        The hook, which ``disarm`` undoes wherever it stands.
    """
    if isinstance(sys.excepthook, OneLineEnd):
        return sys.excepthook
    hook = OneLineEnd(mistake, kinds, sys.excepthook, traced)
    sys.excepthook = hook
    return hook


def disarm() -> None:
    """Put the former hook back, unless somebody else has put his own in front since."""
    if isinstance(sys.excepthook, OneLineEnd):
        sys.excepthook.disarm()


class OneLineEnd:
    """The hook.

    Args:
        mistake, others, traced: see ``arm``.
        former: the hook that was there.
    """

    def __init__(
        self,
        mistake: type[BaseException],
        others: tuple[type[BaseException], ...],
        former: Hook,
        traced: Callable[[BaseException], bool],
    ) -> None:
        self.mistake, self.others, self.former, self.traced = mistake, others, former, traced
        self.armed = True

    def disarm(self) -> None:
        """Put the former hook back; where somebody has put his own in front, only hand on to it."""
        self.armed = False
        if sys.excepthook is self:
            sys.excepthook = self.former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print a line, or hand on to the former hook.

        Raises:
            SystemExit: the error is a user's mistake.
        """
        line = f"megatron_npu: error: {error}"
        if not self.armed or self.traced(error):
            self.former(kind, error, trace)
        elif issubclass(kind, self.others):
            launcher_report.tell(line)
            print(line, file=sys.stderr)
        elif issubclass(kind, self.mistake):
            launcher_report.tell(line)
            # torch.distributed's hook gathers what this one prints, and loses it where this one raises
            gathered = isinstance(sys.stderr, io.StringIO)
            stream = sys.__stderr__ if gathered else sys.stderr
            print(line, file=stream, flush=True)
            if not hasattr(sys, "ps1"):  # not at a prompt, which continues
                raise SystemExit(2)
        else:
            self.former(kind, error, trace)
