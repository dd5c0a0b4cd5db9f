"""Processes that ``multiprocessing`` spawns: they start with a fresh interpreter and must be patched, too.

A spawned child runs the main script again under another name, so it imports Megatron: the writers of
asynchronous checkpoints, the server of their results, workers of loaders. Where the package is installed,
torch's entry point arms the hook there. Where it is only on ``PYTHONPATH``, or torch's autoload is off,
nothing would, and the child would fail on what is patched in its parent.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
from collections.abc import Callable
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)

_original: Callable[..., list[str]] | None = None
_ARMING = "import megatron_npu"
_statements = [_ARMING]


def run_first(statement: str) -> None:
    """Let every child that is spawned from now on run a statement, too, before anything else of its own."""
    if statement not in _statements:
        _statements.append(statement)


def arm() -> None:
    """Let every child that is spawned from now on import this package first, from where it is here."""
    global _original
    if _original is not None:
        return
    _original = original = multiprocessing.spawn.get_command_line

    @functools.wraps(original)
    def get_command_line(**arguments: int) -> list[str]:
        command = original(**arguments)
        if "-c" in command:  # not in a frozen executable
            program = command.index("-c") + 1
            # spawn replaces sys.path by the parent's right after this, before the main script runs
            first = "; ".join([f"import sys; sys.path.append({_ROOT!r})", *_statements])
            command[program] = f"{first}; {command[program]}"
        return command

    multiprocessing.spawn.get_command_line = get_command_line


def disarm() -> None:
    """Let children be spawned as Python does it."""
    global _original
    if _original is not None:
        multiprocessing.spawn.get_command_line = _original
        _original = None
    _statements[:] = [_ARMING]
