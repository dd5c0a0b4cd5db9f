"""Read the rank of this process from a launcher's environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_npu.base import digits
from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Ranks:
    """The global and the local rank of a process, and the number of processes.

    Attributes:
        rank: the number of the process, from 0.
        local_rank: the number of the process on its machine, which is also the number of its device.
        world_size: the number of processes on all machines.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def launched() -> bool:
    """Return True if a launcher (torchrun, or ``train`` itself) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def of_this_process() -> Ranks:
    """Return the ranks of this process.

    Without a launcher, they are those of a single process.
    """
    if not launched():
        return Ranks()
    return Ranks(
        from_environment("RANK", 0), from_environment("LOCAL_RANK", 0), from_environment("WORLD_SIZE", 1)
    )


def require_as_many(asked: int | None) -> None:
    """Check that the number of ranks on this machine equals ``--nproc-per-node``, if this flag is given.

    Raises:
        UsageError: the numbers differ.
    """
    there = os.environ.get("LOCAL_WORLD_SIZE")
    if asked is not None and there is not None and there != str(asked):
        raise UsageError(
            f"--nproc-per-node is {asked}, but a launcher has already started {there} ranks on this "
            "machine. Remove --nproc-per-node."
        )


def from_environment(name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    """Return a number from an environment variable that a launcher or a user has set.

    Raises:
        UsageError: the value is not a number, or out of range.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    number = digits.number(text)
    if number is None or number < least or (most is not None and number > most):
        open_ended = "a positive integer" if least else "a non-negative integer"
        expected = open_ended if most is None else f"an integer from {least} to {most}"
        raise UsageError(f"{name} must be {expected}, but got {text}. Correct it, or unset {name}.")
    return number
