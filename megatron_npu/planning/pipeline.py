"""The time of an iteration on a pipeline whose stages run their passes in a recorded order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

FORWARD, BACKWARD = "F", "B"
Pass = tuple[str, int, int]  # FORWARD or BACKWARD, the model chunk of the stage, the micro batch
Order = Sequence[Pass]


def micro_batches(orders: Sequence[Order]) -> int:
    """Return the number of micro batches in the recorded orders."""
    return sum(kind == FORWARD and chunk == 0 for kind, chunk, _ in orders[0])


def span(orders: Sequence[Order], seconds: Callable[[str, int, int], float]) -> float | None:
    """Return the time from the first pass to the last one.

    A forward pass starts when the chunk before it has finished that micro batch, a backward pass when the
    chunk after it has; each stage runs one pass at a time, in its order.

    Args:
        orders: the passes of each stage, in the order in which the stage runs them.
        seconds: returns the duration of a pass, given its kind, stage and chunk.

    Returns:
        The time in seconds; None if the orders do not fit together: a pass waits for one that never runs.
    """
    stages = len(orders)
    chunks = 1 + max((chunk for order in orders for _, chunk, _ in order), default=-1)
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, chunk, batch = order[at[stage]]
                needed = _needed(kind, chunk * stages + stage, batch, stages * chunks)
                if any(each not in ends for each in needed):
                    break
                begin = max([free[stage], *(ends[each] for each in needed)])
                free[stage] = begin + seconds(kind, stage, chunk)
                ends[kind, chunk * stages + stage, batch] = free[stage]
                at[stage] += 1
                moved = True
    whole = chunks > 0 and all(len(order) == 2 * chunks * micro_batches(orders) for order in orders)
    return max(free) if whole and all(map(_is_done, at, orders)) else None


def _is_done(at: int, order: Order) -> bool:
    return at == len(order)


def _needed(kind: str, place: int, batch: int, places: int) -> list[tuple[str, int, int]]:
    """Return the passes that must end before a pass at a place (a chunk, counted over all stages) begins."""
    if kind == FORWARD:
        return [(FORWARD, place - 1, batch)] if place else []
    after = [(BACKWARD, place + 1, batch)] if place + 1 < places else []
    return [(FORWARD, place, batch), *after]
