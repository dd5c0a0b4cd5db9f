"""Determine from the records of all ranks which ranks are late, and format the messages about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron_npu.watchdog.board import Beat, Process, Word
from megatron_npu.watchdog.phases import WAITING

SHOWN = 8  # stacks in one verdict

Told = tuple[Process, Beat]
_Numbered = TypeVar("_Numbered", Beat, Word)


def of_end(process: Process, error: str | None, beat: Beat) -> str:
    """Return the message about a process that has ended.

    ``error`` is None if it did not report an error.
    """
    how = f"exited with {error}" if error else "exited without an error message (it may have been killed)"
    return f"{process} {how}; last seen {beat}"


def silent(
    others: Sequence[Process], before: Sequence[_Numbered], after: Sequence[_Numbered]
) -> list[tuple[Process, _Numbered]]:
    """Return the ranks whose heartbeat did not change between two reads, with their heartbeats."""
    told = zip(others, before, after, strict=True)
    return [(process, word) for process, word, later in told if word.number == later.number]


def of_silent(gone: Sequence[Told]) -> str:
    """Return the message about ranks whose heartbeat stopped while another rank failed."""
    return "; ".join(f"{process} is lost, last seen {beat}" for process, beat in gone)


def of_neighbour(process: Process, beat: Beat, seconds: float) -> str:
    """Return the message about a rank whose heartbeat the next rank no longer receives."""
    return (
        f"{process} has sent no heartbeat for {seconds:.0f} s: it is suspended, or its machine is down; "
        f"last seen {beat}{beat.stack()}"
    )


def late(living: Sequence[Process], beats: Sequence[Beat], still: float) -> list[Told]:
    """Return the ranks for which the others are waiting, if no rank makes progress.

    Ranks outside a collective block those inside one, and ranks in an earlier step block those in a later
    step. If neither criterion applies, all ranks are returned.

    Args:
        living: the ranks that have not ended.
        beats: the last heartbeat of each rank.
        still: the number of seconds without progress after which a rank counts as hanging.

    Returns:
        The ranks; empty if a rank has moved since, or waits for something outside the run.
    """
    if any(beat.still < still or beat.phase == WAITING for beat in beats):
        return []
    told = list(zip(living, beats, strict=True))
    steps = [beat.step for beat in beats]
    keeping = [
        (process, beat)
        for process, beat in told
        if not beat.collective or beat.step == min(steps) < max(steps)
    ]
    return keeping or told


def of_late(waited_for: Sequence[Told], limit: float) -> str:
    """Return the message about late ranks, with their positions and stacks."""
    told = "; ".join(f"{process} is {beat}" for process, beat in waited_for)
    return f"no rank has made progress for {limit:.0f} s: {told}{_stacks(waited_for)}"


def _stacks(waited_for: Sequence[Told]) -> str:
    """Return the stacks of the late ranks.

    Only they show the cause if the host waits for its device.
    """
    if len(waited_for) == 1:
        return waited_for[0][1].stack()
    shown = "".join(f"\n rank {process.rank}:{beat.stack()}" for process, beat in waited_for[:SHOWN])
    return shown + ("\n …" if len(waited_for) > SHOWN else "")


def of_cut(rank: int, first: Process | None, where: str, seconds: float) -> str:
    """Return the message about a store in another process that does not answer."""
    return (
        f"rank {rank} exits: the run's store at {where} has not answered for {seconds:.0f} s: the "
        f"network to the machine of {first or 'rank 0'} is interrupted, or that machine is suspended or "
        "down"
    )


def of_store(first: Process | None, *, has_ended: bool, error: Exception) -> str:
    """Return the message about the loss of the store that rank 0 served."""
    who = first or "rank 0"
    if has_ended:
        return f"{who} has exited (killed, or with an error), and the run's store has ended with it"
    return f"the run's store is lost, and possibly {who} as well ({type(error).__name__})"
