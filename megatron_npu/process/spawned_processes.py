"""Run statements of this project in processes that ``multiprocessing`` spawns with a new interpreter.

A spawned child runs the main script again under another name, so it imports Megatron. Examples are writers of
asynchronous checkpoints, their result server, and data-loader workers. If the package is installed, torch's
entry point installs the hook there. If it is only on ``PYTHONPATH``, or torch's autoload is off, the child
would run unpatched and fail.

Python starts these children and its helpers (the shared-memory tracker, the ``forkserver``) with ``-c``,
which searches the working directory for modules first. That folder may belong to another user, so it is not
searched here.
"""

from __future__ import annotations

import multiprocessing.spawn
import multiprocessing.util
import sys
from collections.abc import Callable
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
_ARMING = "import megatron_npu"
_FLAGS = "_args_from_interpreter_flags"


def run_first(statement: str) -> None:
    """Make every child process that is spawned from now on run a statement before its own code."""
    statements = arm().statements
    if statement not in statements:
        statements.append(statement)


def arm() -> _Command:
    """Make every child process that is spawned from now on import this package first, from the same location.

    A second call has no effect.

    Returns:
        The object that creates the commands of children.
    """
    command = multiprocessing.spawn.get_command_line
    if not isinstance(command, _Command):
        command = multiprocessing.spawn.get_command_line = _Command(command)
    flags = getattr(multiprocessing.util, _FLAGS)
    if not isinstance(flags, _Flags):
        setattr(multiprocessing.util, _FLAGS, _Flags(flags))
    return command


def disarm() -> None:
    """Restore Python's original method of spawning child processes."""
    flags = getattr(multiprocessing.util, _FLAGS)
    if isinstance(flags, _Flags):
        setattr(multiprocessing.util, _FLAGS, flags.original)
    command = multiprocessing.spawn.get_command_line
    if isinstance(command, _Command):
        multiprocessing.spawn.get_command_line = command.original


class _Flags:
    """Return Python's interpreter flags for a child process, with ``-P`` added.

    The child receives its parent's module search path separately.

    Args:
        original: Python's function.
    """

    def __init__(self, original: Callable[[], list[str]]) -> None:
        self.original = original

    def __call__(self) -> list[str]:
        flags = self.original()
        return flags if "-P" in flags or sys.version_info < (3, 11) else [*flags, "-P"]


class _Command:
    """Replacement for Python's ``get_command_line`` that makes the child run additional statements first.

    Args:
        original: Python's function.
    """

    def __init__(self, original: Callable[..., list[str]]) -> None:
        self.original = original
        self.statements = [_ARMING]

    def __call__(self, **arguments: int) -> list[str]:
        command = self.original(**arguments)
        if "-c" in command:  # not in a frozen executable
            program = command.index("-c") + 1
            # spawn replaces sys.path by the parent's right after this, before the main script runs
            path = f"import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append({_ROOT!r})"
            first = "; ".join([path, *self.statements])
            command[program] = f"{first}; {command[program]}"
        return command
