"""Find ranks that compute more slowly than others with the same work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

SLOWER = 1.5  # than the median of ranks with the same layers


def slow_ranks(milliseconds: Sequence[float], stages: Sequence[int]) -> Mapping[int, float]:
    """Return the ranks that are slower than others with the same layers, each with the slowdown factor."""
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
