"""Print a user's error as a single line when the process ends, even outside this project's commands.

``megatron-npu`` catches these errors itself. With torch's entry point or ``import megatron_npu``, they reach
the interpreter, which would print a long traceback.
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
    traced: Callable[[BaseException], bool] | None = None,
) -> OneLineEnd:
    """Install an exception hook that prints errors of the given kinds as one line.

    Other errors are passed to the previous hook.

    A second call adds its kinds to the hook, and replaces ``traced`` if it is given.

    Args:
        mistake: the class of user errors, for which the exit code is 2, as for our commands.
        kinds: other errors, for which the exit code is Python's, 1.
        traced: returns whether to print the traceback of an error as well.

    Returns:
        The hook; call ``disarm`` on it to remove it.
    """
    hook = sys.excepthook
    if not isinstance(hook, OneLineEnd):
        hook = OneLineEnd(mistake, (), hook, lambda error: False)
        sys.excepthook = hook
    hook.others = (*hook.others, *kinds)
    hook.traced = traced or hook.traced
    return hook


def disarm() -> None:
    """Restore the previous exception hook, unless other code has installed its own hook since then."""
    if isinstance(sys.excepthook, OneLineEnd):
        sys.excepthook.disarm()


class OneLineEnd:
    """Exception hook that prints users' errors as one line.

    Args:
        mistake, others, traced: see ``arm``.
        former: the previous hook.
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
        """Restore the previous exception hook.

        If other code has installed its hook in front of this one, this hook only passes errors on.
        """
        self.armed = False
        if sys.excepthook is self:
            sys.excepthook = self.former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print a user's error as one line.

        Other errors are passed to the previous hook.

        Raises:
            SystemExit: the error is a user error.
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
