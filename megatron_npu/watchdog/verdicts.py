"""Find the late ranks from the ranks' records, and write the messages, without store, threads or clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron_npu.watchdog.board import Beat, Process, Word
from megatron_npu.watchdog.phases import WAITING

SHOWN = 8  # stacks in one verdict

Told = tuple[Process, Beat]
_Numbered = TypeVar("_Numbered", Beat, Word)


def of_end(process: Process, error: str | None, beat: Beat) -> str:
    """Return the message for a process that ended with ``error``; None: it did not report one."""
    how = f"ended with {error}" if error else "ended without an error message (killed?)"
    return f"{process} {how}; last seen {beat}"


def silent(
    others: Sequence[Process], before: Sequence[_Numbered], after: Sequence[_Numbered]
) -> list[tuple[Process, _Numbered]]:
    """Return the ranks whose heartbeat did not change between two reads, with that heartbeat."""
    told = zip(others, before, after, strict=True)
    return [(process, word) for process, word, later in told if word.number == later.number]


def of_silent(gone: Sequence[Told]) -> str:
    """Return the message for ranks whose heartbeat stopped while another rank failed."""
    return "; ".join(f"{process} is lost, last seen {beat}" for process, beat in gone)


def of_neighbour(process: Process, beat: Beat, seconds: float) -> str:
    """Return the message for a rank whose heartbeat the next rank no longer receives."""
    return (
        f"{process} has sent no heartbeat for {seconds:.0f} s: it is stopped, or its machine is "
        f"lost; last seen {beat}{beat.stack()}"
    )


def late(living: Sequence[Process], beats: Sequence[Beat], still: float) -> list[Told]:
    """Return the ranks that the others wait for, if no rank makes progress.

    Ranks outside a collective block those inside one, and ranks in an earlier step block those in a later
    one. If neither criterion applies, all are returned.

    Args:
        living: ranks that have not ended.
        beats: the last heartbeat of each rank.
        still: seconds without progress after which a rank counts as hanging.

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
    """Return the message about late ranks: which they are, where they are, and their stacks."""
    told = "; ".join(f"{process} is {beat}" for process, beat in waited_for)
    return f"no rank has moved for {limit:.0f} s: {told}{_stacks(waited_for)}"


def _stacks(waited_for: Sequence[Told]) -> str:
    """Return the stacks of the late ranks: if the host waits for its device, only they show the cause."""
    if len(waited_for) == 1:
        return waited_for[0][1].stack()
    shown = "".join(f"\n rank {process.rank}:{beat.stack()}" for process, beat in waited_for[:SHOWN])
    return shown + ("\n …" if len(waited_for) > SHOWN else "")


def of_cut(rank: int, first: Process | None, where: str, seconds: float) -> str:
    """Return the message for a store on another process that has not answered."""
    return (
        f"rank {rank} exits: the store of the run at {where} has not answered for {seconds:.0f} s: "
        f"the network to the machine of {first or 'rank 0'} is cut, or that machine is stopped or "
        "lost"
    )


def of_store(first: Process | None, *, has_ended: bool, error: Exception) -> str:
    """Return the message for a lost store, which rank 0 hosted."""
    who = first or "rank 0"
    if has_ended:
        return f"{who} has ended (killed, or with an error), and with it the store of the run"
    return f"the store of the run is lost, and possibly {who} too ({type(error).__name__})"
