"""Compute the time of an iteration on a pipeline whose stages run their passes in a recorded order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

FORWARD, BACKWARD = "F", "B"
Pass = tuple[str, int, int]  # FORWARD or BACKWARD, the model chunk of the stage, the micro batch
Order = Sequence[Pass]


def micro_batches(orders: Sequence[Order]) -> int:
    """Return the number of micro-batches in the recorded order of passes."""
    return sum(kind == FORWARD and chunk == 0 for kind, chunk, _ in orders[0])


def span(orders: Sequence[Order], seconds: Callable[[str, int, int], float]) -> float | None:
    """Return the time from the beginning of the first pass to the end of the last one.

    A forward pass starts when the chunk before it has finished that micro batch, a backward pass when the
    chunk after it has; each stage runs one pass at a time, in its order.

    Args:
        orders: the passes of each stage, in the order in which the stage runs them.
        seconds: returns the duration of a pass, given its kind, stage and chunk.

    Returns:
        The time in seconds; None if the orders do not fit together: a pass waits for one that never runs.
    """
    stages, chunks = len(orders), len({chunk for order in orders for _, chunk, _ in order})
    if {len(order) for order in orders} != {2 * chunks * micro_batches(orders)} or not chunks:
        return None
    ends: dict[Pass, float] = {}
    free, left = [0.0] * stages, [list(reversed(order)) for order in orders]
    stage = idle = 0
    while idle < stages:  # until no stage can begin its next pass
        begin = _begin(ends, left[stage], stage, stages, chunks)
        if begin is None:
            stage, idle = (stage + 1) % stages, idle + 1
            continue
        kind, chunk, batch = left[stage].pop()
        free[stage] = max(free[stage], begin) + seconds(kind, stage, chunk)
        ends[kind, chunk * stages + stage, batch] = free[stage]
        idle = 0
    return None if any(left) else max(free)


def _begin(ends: dict[Pass, float], left: list[Pass], stage: int, stages: int, chunks: int) -> float | None:
    """Return the time at which the next pass of a stage can begin, or None if the time is unknown or no
    pass is left.
    """
    if not left:
        return None
    kind, chunk, batch = left[-1]
    needed = _needed(kind, chunk * stages + stage, batch, stages * chunks)
    found = [ends[each] for each in needed if each in ends]
    return max(found, default=0.0) if len(found) == len(needed) else None


def _needed(kind: str, place: int, batch: int, places: int) -> list[tuple[str, int, int]]:
    """Return the passes that must end before a pass through the given chunk can begin."""
    if kind == FORWARD:
        return [(FORWARD, place - 1, batch)] if place else []
    after = [(BACKWARD, place + 1, batch)] if place + 1 < places else []
    return [(FORWARD, place, batch), *after]
