"""Find ranks that compute more slowly than other ranks with the same work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

SLOWER = 1.5  # than the median of ranks with the same layers


def slow_ranks(milliseconds: Sequence[float], stages: Sequence[int]) -> Mapping[int, float]:
    """Return the slowdown factor of each rank that is slower than other ranks with the same layers."""
    if len(milliseconds) != len(stages):
        return {}
    found: dict[int, float] = {}
    for stage in set(stages):
        ranks = [rank for rank, own in enumerate(stages) if own == stage]
        usual = statistics.median_low([milliseconds[rank] for rank in ranks])
        if usual > 0:
            found |= {
                rank: milliseconds[rank] / usual for rank in ranks if milliseconds[rank] > SLOWER * usual
            }
    return dict(sorted(found.items()))
