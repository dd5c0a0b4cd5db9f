"""Processes that ``multiprocessing`` spawns: they start with a fresh interpreter and must be patched too.

A spawned child runs the main script again under another name, so it imports Megatron: the writers of
asynchronous checkpoints, the server of their results, workers of loaders. Where the package is installed,
torch's entry point arms the hook there. Where it is only on ``PYTHONPATH``, or torch's autoload is off,
nothing would, and the child would fail on what is patched in its parent.

Python starts them, and its helpers (the tracker of shared memory, the server of ``forkserver``), with ``-c``,
which looks for modules in the working directory first. That may be a stranger's: here they do not.
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
    """Let every child that is spawned from now on run a statement too, before anything else of its own."""
    statements = arm().statements
    if statement not in statements:
        statements.append(statement)


def arm() -> _Command:
    """Let every child that is spawned from now on import this package first, from where it is here.

    A second call changes nothing.

    Returns:
        What makes the commands of children.
    """
    command = multiprocessing.spawn.get_command_line
    if not isinstance(command, _Command):
        command = multiprocessing.spawn.get_command_line = _Command(command)
    flags = getattr(multiprocessing.util, _FLAGS)
    if not isinstance(flags, _Flags):
        setattr(multiprocessing.util, _FLAGS, _Flags(flags))
    return command


def disarm() -> None:
    """Set children to spawned as Python does it."""
    flags = getattr(multiprocessing.util, _FLAGS)
    if isinstance(flags, _Flags):
        setattr(multiprocessing.util, _FLAGS, flags.original)
    command = multiprocessing.spawn.get_command_line
    if isinstance(command, _Command):
        multiprocessing.spawn.get_command_line = command.original


class _Flags:
    """Python's flags of a child's interpreter, and ``-P``; a spawned child has its parent's path in any case.

    Args:
        original: Python's.
    """

    def __init__(self, original: Callable[[], list[str]]) -> None:
        self.original = original

    def __call__(self) -> list[str]:
        flags = self.original()
        return flags if "-P" in flags or sys.version_info < (3, 11) else [*flags, "-P"]


class _Command:
    """Python's ``get_command_line``, whose command runs statements of ours first.

    Args:
        original: Python's.
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
