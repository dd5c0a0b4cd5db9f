"""The training losses that a program of a document on DistributedDataParallel prints."""

from __future__ import annotations

import re

# two processes may print onto one line
_LINE = re.compile(r"\[GPU(\d)\] Epoch \d+ \(Batch (\d+)\): Train loss (\d+\.\d+)")


def losses(output: str, processes: int) -> list[float]:
    """Return the training loss of each step: the mean over the processes."""
    found: dict[int, list[float]] = {}
    for _, batch, loss in _LINE.findall(output):
        found.setdefault(int(batch), []).append(float(loss))
    assert found, output
    assert all(len(of_ranks) == processes for of_ranks in found.values()), output
    return [sum(sorted(found[batch])) / processes for batch in sorted(found)]
