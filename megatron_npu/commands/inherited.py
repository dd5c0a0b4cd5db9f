"""Correct or reject what a command has inherited from the program that started it."""

from __future__ import annotations

import os
import signal

from megatron_npu.base.errors import UsageError


def settle() -> None:
    """Handle SIGCHLD again if the parent ignored it, and check that there is a working directory.

    While SIGCHLD is ignored, nobody learns the exit code of a child: a failure would count as success.

    Raises:
        UsageError: the working directory has been removed.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.getcwd()
    except FileNotFoundError as error:  # MKL would end the process with an error about a library of torch
        raise UsageError(
            "the working directory has been removed", remedy="Change to a folder that exists."
        ) from error


def cause_of(error: Exception) -> UsageError | None:
    """Return the message for an error that an inherited variable causes: a warning that was raised as an
    error, or a log that torch does not have; None for any other error.
    """
    if isinstance(error, ValueError) and "Invalid log settings" in str(error):
        return UsageError(
            f"torch does not accept TORCH_LOGS={os.environ.get('TORCH_LOGS', '')}",
            "names of its logs, separated by commas",
            "Correct or unset TORCH_LOGS (TORCH_LOGS=help lists the names).",
        )
    if not isinstance(error, Warning):
        return None
    return UsageError(
        f"a warning was raised as an error ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
        remedy="Change PYTHONWARNINGS or Python's -W: stock Megatron and torch emit such warnings.",
    )
